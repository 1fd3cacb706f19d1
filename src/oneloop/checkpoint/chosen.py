"""The checkpoint of a run that a user names. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from oneloop.basics.errors import BadInput
from oneloop.checkpoint.base import base_problems
from oneloop.checkpoint.store import Store, problems, read_manifest, step_of


def checkpoint_of(run: Path, asked: str) -> Path:
    """The checkpoint that a user names: newest, best, or a step.

    Raises:
        BadInput: there is none, or it is damaged.
    """
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
        raise BadInput(f"--checkpoint {asked}: there is none; steps: {', '.join(map(str, names))}")
    if wrong := problems(names[step]) or base_problems(names[step]):
        raise BadInput(f"{names[step]} is damaged: {'; '.join(wrong)}; choose another with --checkpoint STEP")
    return names[step]
