"""Log lines about texts: those that are cut, and those that a tokenizer does not know."""

from typing import Any

from oneloop.tasks.rows.cached_arrays import WARNED, remark

_SHOWN = 9  # tokens, up to the first one that stands for unknown text
_ACTIONS = {"cut": "truncated", "split": "split into several", "drop": "dropped"}


def cut_notes(count: int, total: int, what: str, overlong: str, *, lost: int = 0) -> list[str]:
    """Return a line about texts that are longer than a limit; none if there are none.

    Args:
        count: number of these texts.
        total: number of all texts.
        what: plural of what is counted, and the limit.
        overlong: what is done with them: cut, split or drop.
        lost: number of answers that lose their end if texts are cut.
    """
    if not count:
        return []
    line = f"{count:,} of {total:,} {what} and are {_ACTIONS[overlong]}"
    if lost and overlong == "cut":
        line += f"; of {lost:,} the answer loses its end"
    # Text that is split is not lost.
    if overlong != "split" and count >= WARNED * total:
        line = f"warning: {line}"
    return [line]


def remark_unknown(tokens: list[int], tokenizer: Any) -> None:
    """Count the row if tokens of its text stand for unknown text.

    They are not counted if they also begin or end texts.
    """
    unknown = tokenizer.unk_token_id
    if unknown in tokens and unknown not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        place = tokens.index(unknown)
        shown = tokenizer.decode(tokens[: place + 1][-_SHOWN:])
        remark("have text that is unknown to the tokenizer", repr(shown))
