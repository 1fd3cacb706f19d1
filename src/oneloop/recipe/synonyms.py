"""oneloop's keys by the names that other trainers use for the same settings.

The trainers are Trainer, Lightning, accelerate, timm and torchtune.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

# Each line of the file is "key: name name …".
_KEYS: dict[str, list[str]] = {}  # keys by name
for _line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
    _key, _, _names = _line.partition(": ")
    for _name in _names.split():
        _KEYS.setdefault(_name, []).append(_key)
_FIXED = "the reference is the model before the first step, and never follows it; remove the key"
_ONCE = (
    "a run computes the log-probabilities of the reference once, before its first step; remove the "
    "key (task.store: where they are stored)"
)
_STORED = (
    "the outputs of the teacher are computed before the first step, on the texts of the data; "
    "remove the key. To train on texts of a model, write them with oneloop predict"
)
_EXPLANATIONS = {
    "lmbda": _STORED,
    "seq_kd": _STORED,
    "sync_ref_model": _FIXED,
    "ref_model_sync_steps": _FIXED,
    "ref_model_mixup_alpha": _FIXED,
    "ref_model": _FIXED,
    "precompute_ref_log_probs": _ONCE,
    "precompute_ref_batch_size": _ONCE,
}
"""what oneloop does instead of other trainers' settings that it has no key for"""
OF_TASKS = set[str]()  # keys of oneloop
_OPTIONS: dict[str, str] = {}  # options of the launcher
for _name, _keys in _KEYS.items():
    for _key in _keys:
        if _key.startswith("task."):
            OF_TASKS.add(_key)
        elif _key.startswith("--"):
            _OPTIONS[_name] = _key


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for an unknown key or name, an explanation, or an empty text.

    Synonyms go before a similar spelling. Of a key with a group (``run.output_dir``,
    ``task.seed``), only the part after the dot is looked up.

    Args:
        word: the unknown key or name.
        known: the known ones.
    """
    known = list(known)
    last = word.rpartition(".")[2].replace("-", "_").lower()
    if last in known:  # a top-level key inside a group
        return f"; did you mean {last!r}?"
    if last in _EXPLANATIONS:
        return f"; {_EXPLANATIONS[last]}"
    option = _OPTIONS.get(last)
    if option and "duration" in known:  # ``known`` are keys, and not names of a group
        return (
            f"; it is an option of the launcher: oneloop launch --config_file ddp {option} RECIPE …"
        )

    # Prefer a synonym to a name that is spelled like it.
    synonyms = [key for key in _KEYS.get(last, ()) if key in known]
    near = synonyms or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def may_be_of_task(word: str) -> bool:
    """Return whether an unknown key is another name of a task's key.

    Only the imported task knows its keys.
    """
    return not OF_TASKS.isdisjoint(_KEYS.get(word.rpartition(".")[2], ()))
