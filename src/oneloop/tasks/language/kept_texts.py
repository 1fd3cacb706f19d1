"""Texts that their tokens do not give back: kept before the tokens, for metrics of generated texts.

A tokenizer may drop or replace characters. The text of an answer then precedes the tokens of its
row, as bytes that are larger than any token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    answer = first_answer(tokens.tolist())
    written = tokenizer.decode(answer, skip_special_tokens=True)
    if written.strip() == text:
        return tokens

    content = text.encode(errors="replace")
    kept = [byte + BYTE for byte in content]
    return np.array([*kept, *tokens], dtype=np.int32)


def first_answer(tokens: Iterable[int]) -> list[int]:
    """Return the first tokens that are not negative."""
    answer = list[int]()
    for token in tokens:
        if token >= 0:
            answer.append(token)
        elif answer:
            break
    return answer


def apart(tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], str]:
    """Return the tokens, and the text before them or ""."""
    start = int((tokens >= BYTE).sum())
    content = tokens[:start] - BYTE
    text = bytes(content.tolist())
    return tokens[start:], text.decode()


def ranges(texts: Ragged) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return where each text begins in ``texts.values``, where its tokens do, and where it ends."""
    ends = np.asarray(texts.ends, dtype=np.int64)
    begins = np.append(0, ends)[:-1]
    places = np.flatnonzero(texts.values >= BYTE)
    text = np.searchsorted(ends, places, side="right")
    sizes = np.bincount(text, minlength=len(ends))
    return begins, begins + sizes, ends


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

    # Show the first one.
    begin = begins[kept[0]]
    end = ends[kept[0]]
    tokens, text = apart(texts.values[begin:end])
    answer = first_answer(tokens.tolist())
    decoded = decode(answer)
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
    kept = batch.get("text", decoded)
    found = []
    for text, other in zip(kept, decoded, strict=True):
        found.append(text or other)
    return found
