"""Texts that their tokens do not give back: kept before the tokens, for metrics of generated texts.

A tokenizer may drop or replace characters. The text of an answer then precedes the tokens of its
row, as bytes that are larger than any token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.rows.cached_arrays import Ragged

BYTE = 1 << 30  # added to each byte


def with_text(tokens: NDArray[np.int32], text: str, tokenizer: Any) -> NDArray[np.int32]:
    """Return tokens, after the text of their first answer if they do not give it back.

    Blanks at both ends, and special tokens in the text, do not count.

    Args:
        tokens: of a row; complements are no part of an answer.
        text: of the answer.
        tokenizer: of transformers.
    """
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    text = text.strip()
    if tokenizer.decode(first_answer(tokens.tolist()), skip_special_tokens=True).strip() == text:
        return tokens
    content = np.frombuffer(text.encode(errors="replace"), np.uint8)
    return np.append(content.astype(np.int32) + np.int32(BYTE), tokens)


def first_answer(tokens: Iterable[int]) -> list[int]:
    """Return the first tokens that are not negative."""
    answer = dropwhile(lambda token: token < 0, tokens)
    return [*takewhile(lambda token: token >= 0, answer)]


def apart(tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], str]:
    """Return the tokens, and the text before them or ""."""
    start = int((tokens >= BYTE).sum())
    return tokens[start:], bytes((tokens[:start] - BYTE).tolist()).decode()


def ranges(texts: Ragged) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where each text begins in ``texts.values``, where its tokens do, and where it ends."""
    ends = np.asarray(texts.ends, dtype=np.int64)
    begins = np.append(0, ends)[:-1]
    kept = np.searchsorted(ends, np.flatnonzero(texts.values >= BYTE), side="right")
    return begins, begins + np.bincount(kept, minlength=len(ends)), ends


def kept_notes(texts: Ragged, decode: Callable[[list[int]], str]) -> list[str]:
    """Return a line about texts that tokens do not give back; none if there are none.

    Args:
        texts: tokens of each row.
        decode: from the tokens of an answer to its text.
    """
    begins, starts, ends = ranges(texts)
    kept = np.flatnonzero(begins < starts)
    if not len(kept):
        return []
    tokens, text = apart(texts.values[begins[kept[0]] : ends[kept[0]]])
    decoded = decode(first_answer(tokens.tolist()))
    line = (
        f"{len(kept):,} of {len(ends):,} targets are not what the tokenizer gives back: {text!r} "
        f"becomes {decoded!r}; metrics of generated texts compare with the text of the row"
    )
    return [line]


def references(batch: Mapping[str, Any], decoded: Sequence[Any]) -> list[Any]:
    """Return the texts of a batch's rows, or what was decoded of their tokens.

    Args:
        batch: of ``collate``; its entry ``text`` has the kept text of each sample, or "".
        decoded: one for each sample.
    """
    return [text or other for text, other in zip(batch.get("text", decoded), decoded, strict=True)]
