"""Read the state in a checkpoint that is not tensors, after checking its form. Needs no torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oneloop.basics.untrusted import Form, check_form, read_json
from oneloop.checkpoint.store import Store

STATE = "state.json"
MOST_STATE = 1 << 28  # bytes; a task may save much
_OPTIMIZER = {"parameters": {None: dict}, "groups": [dict], "own": {None: dict}}

_PAIRS = "keys that are not texts"
Forms = Mapping[str, Form]
"""what each component of a state looks like, by name"""


def read_state(folder: Path, forms: Forms | None = None) -> dict[str, Any]:
    """Return the state of a checkpoint that is not tensors.

    Args:
        folder: the checkpoint.
        forms: of its components by name, as :func:`check_form` reads them; others are not checked.

    Raises:
        ValueError: it is missing or damaged, or a component has another form.
    """
    try:
        state: dict[str, Any] = read_json(folder / STATE, most=MOST_STATE)
    except (OSError, ValueError) as error:
        raise ValueError(f"{STATE} cannot be read ({type(error).__name__}: {error})") from error
    for name, form in {"optimizer": _OPTIMIZER, **(forms or {})}.items():
        if name in state:
            check_form(state[name], form, f"{STATE}[{name!r}]")
    return state


def state_problems(folder: Path, forms: Forms) -> list[str]:
    """Return the problem of a checkpoint's state, as :func:`read_state` reports it."""
    try:
        read_state(folder, forms)
    except ValueError as error:
        return [str(error)]
    return []


def newest_intact(
    store: Store, forms: Forms, say: Callable[[str], None]
) -> tuple[str | None, str | None]:
    """Return the newest intact checkpoint of a store, and an error if all are damaged.

    Delete drafts. Report damaged checkpoints and set them aside, unless nothing would be left.
    """
    # Find it.
    store.sweep(".draft")
    chosen: str | None = None
    damaged = []
    for path, found in store.newest_good():
        wrong = found or state_problems(path, forms)
        if not wrong:
            chosen = str(path)
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


def decoded(value: Any) -> Any:
    """Return the values that :func:`encoded` got; tuples are lists."""
    if isinstance(value, Mapping):
        if value.keys() == {_PAIRS}:
            return {key: decoded(inside) for key, inside in value[_PAIRS]}
        return {key: decoded(inside) for key, inside in value.items()}
    if isinstance(value, list):
        return [decoded(inside) for inside in value]
    return value
