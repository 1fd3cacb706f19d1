"""Log lines about texts: those that are cut, and those that a tokenizer does not know."""

from typing import Any

from oneloop.tasks.rows.cached_arrays import WARNED, remark

_NEAR = 8  # tokens that are shown on each side of one that is unknown
ANSWERS = "of {:,} the answer loses its end"


def cut_notes(
    count: int, total: int, what: str, done: str, *, lost: int = 0, loses: str = ANSWERS
) -> list[str]:
    """Return a line about texts that are longer than a limit; none if there are none.

    Args:
        count: number of these texts.
        total: number of all texts.
        what: plural of what is counted, and the limit.
        done: what is done with them.
        lost: number of what is lost.
        loses: says so, with a place for this number.
    """
    if not count:
        return []
    # Text that is split is not lost.
    begin = "warning: " if count >= WARNED * total and not done.startswith("split") else ""
    end = f"; {loses.format(lost)}" if lost else ""
    return [f"{begin}{count:,} of {total:,} {what} and are {done}{end}"]


def targets(length: int) -> str:
    """Return a length as text: the first token of a text is no target."""
    return f"{length + 1:,} tokens ({length:,} targets)"


def remark_unknown(tokens: list[int], tokenizer: Any) -> None:
    """Count the row if tokens of its text stand for unknown text.

    They are not counted if they also begin or end texts.
    """
    token = tokenizer.unk_token
    number = tokenizer.unk_token_id
    if number in tokens and token not in (tokenizer.bos_token, tokenizer.eos_token):
        place = tokens.index(number)
        near = tokenizer.decode(tokens[max(0, place - _NEAR) : place + _NEAR])
        remark(f"have text that is unknown to the tokenizer ({token!r})", repr(near))
