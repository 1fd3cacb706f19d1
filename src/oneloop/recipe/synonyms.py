"""oneloop's keys by the names that other trainers use for the same settings.

The trainers are Trainer, Lightning, accelerate, timm and torchtune.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

# A line of the file is "key: name name …", or "gone name name …: what to do instead".
_KEYS: dict[str, list[str]] = {}  # keys by name
GONE: dict[str, str] = {}  # sentences by name
for _line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
    _key, _, _names = _line.partition(": ")
    if _key.startswith("gone "):
        GONE |= dict.fromkeys(_key.split()[1:], _names)
        continue
    for _name in _names.split():
        _KEYS.setdefault(_name, []).append(_key)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" for an unknown key or name, or an empty text.

    For a name that has no key any more, or never had one, return ": " and what to do instead.
    Synonyms go before a similar spelling. Of a key with a group (``run.output_dir``,
    ``task.seed``), only the part after the dot is looked up.

    Args:
        word: the unknown key or name.
        known: the known ones.
    """
    known = list(known)
    last = word.rpartition(".")[2].replace("-", "_").lower()
    if sentence := GONE.get(word) or GONE.get(last):
        return f": {sentence}"
    if last in known:  # a top-level key inside a group
        return f"; did you mean {last!r}?"

    # Prefer a synonym to a name that is spelled like it.
    synonyms = [key for key in _KEYS.get(last, ()) if key in known]
    near = synonyms or difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
