"""The checkpoint of a run that a user names. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from oneloop.basics.errors import BadInput
from oneloop.checkpoint.frozen import base_problems
from oneloop.checkpoint.store import MANIFEST, Store, problems, problems_of_files, read_manifest, step_of

FINAL = "final"


def chosen_of(run: Path, asked: str | None, *, weights: str = "raw") -> Path:
    """Return the folder with the weights that a user names: ``final``, or as :func:`checkpoint_of`. None: ``final/`` if
    the run has ended, else the newest checkpoint (always for ``power:SIGMA``). Raises BadInput if it is missing or
    damaged."""
    mixed = weights.startswith("power:")
    asked = asked or ("newest" if mixed else _default(run))
    if asked != FINAL:
        return checkpoint_of(run, asked)
    final = run / FINAL
    if mixed:
        raise BadInput(f"--weights {weights} is mixed from checkpoints, and {final} is none; name a step, or newest")
    if wrong := problems_of_files(final):
        raise BadInput(f"{final} is damaged: {'; '.join(wrong)}; choose a checkpoint with --checkpoint STEP")
    if weights != "raw" and not (final / f"{weights}.safetensors").is_file():
        there = sorted(file.stem for file in final.glob("*.safetensors") if file.stem not in ("model", "adapter_model"))
        raise BadInput(f"{final} holds no average {weights!r}; it has {', '.join(there) or 'none'}")
    return final


def _default(run: Path) -> str:
    sealed = Store(run / "checkpoints").sealed()
    try:
        about = read_manifest(run / FINAL)["about"]
    except ValueError:
        return FINAL if (run / FINAL / MANIFEST).exists() else "newest"  # which says what is wrong
    end = about.get("end", about.get("step", 0))
    return "newest" if sealed and step_of(sealed[-1]) > end else FINAL


def checkpoint_of(run: Path, asked: str) -> Path:
    """Return the checkpoint that a user names: newest, best, or a step. Raises BadInput if it is missing or damaged."""
    store = Store(run / "checkpoints")
    names = {step_of(path): path for path in store.sealed()}
    if not names:
        raise BadInput(f"{run} holds no checkpoint (looked for {store.root}/step-…)")
    newest = max(names)
    if asked == "best":
        try:
            step = read_manifest(names[newest])["about"]["step"]
        except ValueError as error:
            raise BadInput(f"{names[newest]}: {error}; name a step instead of best") from error
        if step not in names:
            raise BadInput("--checkpoint best: no checkpoint of an evaluation is there; name a step, or newest")
    else:
        step = newest if asked == "newest" else int(asked) if asked.isdigit() else -1
    if step not in names:
        raise BadInput(
            f"--checkpoint {asked}: there is none; steps: {', '.join(map(str, names))}; or final, newest, best"
        )
    if wrong := problems(names[step]) or base_problems(names[step]):
        raise BadInput(f"{names[step]} is damaged: {'; '.join(wrong)}; choose another with --checkpoint STEP")
    return names[step]
