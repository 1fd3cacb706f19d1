"""oneloop's keys by the names that Trainer, Lightning, accelerate, timm and torchtune use for the
same settings."""

import difflib
from collections.abc import Iterable
from pathlib import Path

_KEYS: dict[str, list[str]] = {}
for _line in Path(__file__).with_suffix(".txt").read_text().splitlines():
    _key, _, _names = _line.partition(": ")
    for _name in _names.split():
        _KEYS.setdefault(_name, []).append(_key)
OF_TASKS = {key for keys in _KEYS.values() for key in keys if key.startswith("task.")}
# of the launcher
_OPTIONS = {name: key for name, keys in _KEYS.items() for key in keys if key.startswith("--")}


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for an unknown key or name, by its synonyms, else by spelling;
    else nothing.

    Of a key with a group (``run.output_dir``, ``task.seed``), the part after the dot is looked
    up."""
    known = list(known)
    last = word.rpartition(".")[2].replace("-", "_").lower()
    if last in known:  # a top-level key inside a group
        return f"; did you mean {last!r}?"
    if (option := _OPTIONS.get(last)) and "duration" in known:
        return (
            f"; it is an option of the launcher: oneloop launch --config_file ddp {option} RECIPE …"
        )
    synonyms = [key for key in _KEYS.get(last, ()) if key in known]
    near = synonyms or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def may_be_of_task(word: str) -> bool:
    """Whether an unknown key is another name of a task's key, which only the imported task
    knows."""
    return not OF_TASKS.isdisjoint(_KEYS.get(word.rpartition(".")[2], ()))
