"""Read the state in a checkpoint that is not tensors. Needs no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oneloop.basics.untrusted import damaged, read_json
from oneloop.checkpoint.store import Store, problems

STATE = "state.json"
MOST_STATE = 1 << 28  # bytes; a task may save much
_PAIRS = "keys that are not texts"


def read_state(folder: Path) -> dict[str, Any]:
    """Return the state of a checkpoint that is not tensors.

    Raises ValueError if it is missing or damaged. Its values are not checked: use them inside
    :func:`oneloop.basics.untrusted.damaged`.
    """
    try:
        state: dict[str, Any] = read_json(folder / STATE, most=MOST_STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{STATE} cannot be read ({type(error).__name__}: {error})") from error
    return state


def state_problems(folder: Path) -> list[str]:
    """Return the problem of a checkpoint's state, as :func:`read_state` reports it."""
    try:
        read_state(folder)
    except ValueError as error:
        return [str(error)]
    return []


def newest_intact(store: Store, say: Callable[[str], None]) -> tuple[Path | None, str | None]:
    """Return the newest intact checkpoint of a store, and an error if all are damaged.

    Delete drafts. Report damaged checkpoints and set them aside, unless nothing would be left.
    """
    # Find it.
    store.sweep(".draft")
    chosen: Path | None = None
    damaged = []
    for path in reversed(store.sealed()):
        wrong = problems(path) or state_problems(path)
        if not wrong:
            chosen = path
            break
        report = f"checkpoint {path} is damaged and was skipped: {'; '.join(wrong)}"
        damaged.append((path, report))

    # Set the damaged ones aside.
    if damaged and chosen is None:
        reports = "; ".join(report for _, report in damaged)
        return None, f"{reports}; no good one is left: restore one, or choose another run.dir"
    for path, report in damaged:
        say(f"{report}; kept as {store.set_aside(path)}")
    return chosen, None


def encoded(value: Any) -> Any:
    """Return plain values in a form that keeps keys that are not texts in a JSON file."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: encoded(inside) for key, inside in value.items()}
        return {_PAIRS: [[key, encoded(inside)] for key, inside in value.items()]}
    if isinstance(value, list | tuple):
        return [encoded(inside) for inside in value]
    return value


@damaged(STATE)
def decoded(value: Any) -> Any:
    """Return the values that :func:`encoded` got; tuples are lists."""
    if isinstance(value, Mapping):
        if value.keys() == {_PAIRS}:
            return {key: decoded(inside) for key, inside in value[_PAIRS]}
        return {key: decoded(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [decoded(inside) for inside in value]
    return value
