"""Find the checkpoint that a user names, and its frozen parameters or base model in ``base/``.

Needs no torch.
"""

from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.untrusted import damaged, read_json
from oneloop.checkpoint.manifest import BASE, MANIFEST, base_folder, base_in, read_manifest
from oneloop.checkpoint.mirror import complete, local_checkpoint
from oneloop.checkpoint.store import Store, changed, problems, step_of

FILE = "frozen.safetensors"
NAMED = "origin.json"  # instead of FILE: the base model of the parameters, and their names


def base_of(checkpoint: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder with a checkpoint's frozen parameters and its manifest entry.

    None if no parameters are frozen.
    """
    entry = base_in(read_manifest(checkpoint))
    return None if entry is None else (base_folder(checkpoint.parent.parent, entry), entry)


def base_problems(checkpoint: Path) -> list[str]:
    """Return the problems of an intact checkpoint's frozen parameters. Reads them completely."""
    try:
        with damaged(MANIFEST):
            recorded = base_of(checkpoint)
            if recorded is None:
                return []
            folder, entry = recorded
            wrong = changed(folder, {entry["file"]: entry}) or problems(folder)
    except ValueError as error:
        return [str(error)]
    return [f"{BASE}/{folder.name}/{line}" for line in wrong]


def base_model_of(checkpoint: Path) -> dict[str, Any] | None:
    """Return a checkpoint's base model; None if the checkpoint does not refer to one.

    It has a ``place``, with ``files`` or ``commit``, and the ``names`` of its parameters.

    Raises ValueError if its file is missing or of another form.
    """
    recorded = base_of(checkpoint)
    if recorded is None or recorded[1]["file"] != NAMED:
        return None
    try:
        with damaged(NAMED):
            about: dict[str, Any] = read_json(recorded[0] / NAMED)
            about["names"] = [str(name) for name in about["names"]]
    except OSError as error:
        raise ValueError(f"the base model of {checkpoint} is unknown: {error}") from error
    return about


FINAL = "final"


def chosen_of(run: Path, asked: str | None, *, weights: str = "raw") -> Path:
    """Return the folder with the weights that a user names.

    Args:
        run: the run folder.
        asked: ``final``, or as :func:`checkpoint_of`. None: ``final/`` if the run has ended, else
            the newest checkpoint (always for ``power:SIGMA``).
        weights: ``raw``, the name of an EMA, or ``power:SIGMA``.

    Raises:
        BadInput: if it is missing or damaged.
    """
    mixed = weights.startswith("power:")
    asked = asked or ("newest" if mixed else _default(run))
    if asked != FINAL:
        return checkpoint_of(run, asked)
    final = run / FINAL
    if mixed:
        raise BadInput(
            f"--weights {weights} needs checkpoints, and {final} is not one; use a step number "
            "or newest"
        )
    complete(final)
    wrong = problems(final)
    if wrong:
        raise BadInput(
            f"{final} is damaged: {'; '.join(wrong)}; choose a checkpoint with --checkpoint STEP"
        )
    if weights != "raw" and not (final / f"{weights}.safetensors").is_file():
        names = {file.stem for file in final.glob("*.safetensors")} - {"model", "adapter_model"}
        raise BadInput(
            f"{final} has no EMA {weights!r}; it has {', '.join(sorted(names)) or 'none'}"
        )
    return final


def problems_at(path: Path) -> list[str]:
    """Return the problems of a checkpoint or ``final``, also of frozen parameters.

    Fetch it from a mirror first.
    """
    try:
        complete(path, again=True)
    except BadInput as error:
        return [str(error.__cause__ or error)]
    return problems(path) or base_problems(path)


def _default(run: Path) -> str:
    """Return the name of the newest weights: ``final``, or ``newest`` if the run has continued."""
    sealed = Store(run / "checkpoints").sealed()
    try:
        with damaged(MANIFEST):
            end = read_manifest(run / FINAL)["about"].get("end", 0)
            return "newest" if sealed and step_of(sealed[-1]) > end else FINAL
    except ValueError:
        # chosen_of reports the damage
        return FINAL if (run / FINAL / MANIFEST).exists() else "newest"


def checkpoint_of(run: Path, asked: str) -> Path:
    """Return the checkpoint that a user names: newest, best, or a step.

    Raises BadInput if it is missing or damaged.
    """
    store = Store(run / "checkpoints")
    names = {step_of(path): path for path in store.sealed()}
    if not names:
        raise BadInput(f"{run} holds no checkpoint (looked for {store.root}/step-…)")

    # Find the step; the newest checkpoint records the best one.
    newest = max(names)
    step = -1
    if asked == "newest":
        step = newest
    elif asked.isdigit():
        step = int(asked)
    elif asked == "best":
        try:
            with damaged(MANIFEST):
                step = int(read_manifest(names[newest])["about"].get("step", -1))
        except ValueError as error:
            raise BadInput(f"{names[newest]}: {error}; name a step instead of best") from error
        if step not in names:
            raise BadInput(
                "--checkpoint best: no checkpoint of an evaluation is there; name a step, or newest"
            )
    if step not in names:
        steps = ", ".join(map(str, names))
        raise BadInput(
            f"--checkpoint {asked} not found; available steps: {steps}; or final, newest, best"
        )

    # Verify it.
    path = names[step]
    complete(path)
    wrong = problems(path) or base_problems(path)
    if wrong:
        raise BadInput(
            f"{path} is damaged: {'; '.join(wrong)}; choose another with --checkpoint STEP"
        )
    return path


def reject_resume_path(resume: str) -> None:
    """Raise BadInput unless ``run.resume`` is the path of an intact checkpoint."""
    path = local_checkpoint(resume)
    if (path / "checkpoints").is_dir():
        names = ", ".join(found.name for found in Store(path / "checkpoints").sealed())
        raise BadInput(
            f"run.resume {resume} is a run folder; name one of its checkpoints: "
            f"{names or 'it has none'}"
        )
    wrong = problems(path)
    if wrong:
        raise BadInput(
            f"run.resume {resume} is not an intact checkpoint: {'; '.join(wrong[:3])}; give auto, "
            "never, or the path of another …/step-… folder"
        )
