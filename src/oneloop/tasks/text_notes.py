"""Log lines about texts: those that are cut, and tokens that stand for unknown text."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.rows.cached_arrays import Ragged

_WARNED = 0.1  # share of texts that are cut, from which the line is a warning
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
    begin = "warning: " if count >= _WARNED * total and not done.startswith("split") else ""
    end = f"; {loses.format(lost)}" if lost else ""
    return [f"{begin}{count:,} of {total:,} {what} and are {done}{end}"]


def targets(length: int) -> str:
    """Return a length as text: the first token of a text is no target."""
    return f"{length + 1:,} tokens ({length:,} targets)"


def unknown_token(tokenizer: Any) -> int | None:
    """Return the token that stands for unknown text.

    None: there is none, or it also begins or ends texts, so that it cannot be counted.
    """
    token = getattr(tokenizer, "unk_token", None)
    if token is None or token in (tokenizer.bos_token, tokenizer.eos_token):
        return None
    return int(tokenizer.unk_token_id)


def unknown_notes(
    counts: NDArray[Any], tokenizer: Any, what: str, *, trained: int | None = None
) -> list[str]:
    """Return a line about unknown tokens; none if there are none.

    Args:
        counts: of each text.
        tokenizer: of transformers.
        what: plural of what is counted.
        trained: number of these tokens that are targets, if some texts are not trained.
    """
    texts = np.count_nonzero(counts)
    if not texts:
        return []
    found = f"{counts.sum():,} tokens in {texts:,} of {len(counts):,} {what}"
    end = "" if trained is None else f"; {trained:,} of these tokens are targets"
    return [f"{found} are unknown to the tokenizer ({tokenizer.unk_token!r}){end}"]


def unknown_in(
    texts: Ragged, tokenizer: Any, *, scale: int = 1, head: int = 0
) -> tuple[NDArray[np.int64], int]:
    """Return the number of unknown tokens of each text, and how many of all are targets.

    Args:
        texts: tokens, or their complements.
        tokenizer: of transformers.
        scale: a number is a token times this, plus a smaller number.
        head: numbers before the tokens of each text.
    """
    token = unknown_token(tokenizer)
    codes = () if token is None else range(scale * token, scale * token + scale)
    places = np.flatnonzero(np.isin(texts.values, [*codes, *(~code for code in codes)]))
    text = np.searchsorted(texts.ends, places, side="right")
    is_token = places >= np.append(0, texts.ends)[text] + head
    trained = texts.values[places[is_token]] >= 0
    return np.bincount(text[is_token], minlength=len(texts.ends)), int(trained.sum())
