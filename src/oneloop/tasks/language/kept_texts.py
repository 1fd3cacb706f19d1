"""Texts that their tokens do not give back: kept after the tokens, for metrics of generated texts.

A tokenizer may drop or replace characters. The text of an answer then follows the tokens of its
row, as bytes that are larger than any token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.rows.cached_arrays import Ragged

BYTE = 1 << 30  # added to each byte


def with_text(tokens: NDArray[np.int32], text: str, tokenizer: Any) -> NDArray[np.int32]:
    """Return tokens, followed by the text of their first answer if they do not give it back.

    Blanks at both ends, and special tokens in the text, do not count.

    Args:
        tokens: of a row; complements are no part of an answer.
        text: of the answer.
        tokenizer: of transformers.
    """
    for special in tokenizer.all_special_tokens:
        text = text.replace(special, "")
    written = tokenizer.decode(first_answer(tokens), skip_special_tokens=True)
    if written.strip() == text.strip():
        return tokens
    content = np.frombuffer(text.strip().encode(errors="replace"), np.uint8)
    return np.append(tokens, content.astype(np.int32) + np.int32(BYTE))


def first_answer(tokens: NDArray[np.int32]) -> list[int]:
    """Return the first tokens that are no complements."""
    answer = np.append(tokens >= 0, [True, False])
    first = int(answer.argmax())
    return list(tokens[first : first + int(answer[first:].argmin())].tolist())


def apart(tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], str]:
    """Return the tokens, and the text that follows them or ""."""
    stop = int((tokens < BYTE).sum())
    return tokens[:stop], bytes((tokens[stop:] - BYTE).tolist()).decode()


def stops_of(texts: Ragged) -> NDArray[np.int64]:
    """Return where the tokens of each text end in ``texts.values``."""
    ends = np.asarray(texts.ends, dtype=np.int64)
    kept = np.searchsorted(ends, np.flatnonzero(texts.values >= BYTE), side="right")
    return ends - np.bincount(kept, minlength=len(ends))


def kept_notes(texts: Ragged, decode: Callable[[list[int]], str], what: str) -> list[str]:
    """Return a line about texts that tokens do not give back; none if there are none.

    Args:
        texts: tokens of each row.
        decode: from the tokens of an answer to its text.
        what: plural of what is counted.
    """
    kept = np.flatnonzero(stops_of(texts) < texts.ends)
    if not len(kept):
        return []
    start = texts.ends[kept[0] - 1] if kept[0] else 0
    tokens, text = apart(texts.values[start : texts.ends[kept[0]]])
    line = (
        f"{len(kept):,} of {len(texts.ends):,} {what} are not what the tokenizer gives back: "
        f"{text!r} becomes {decode(first_answer(tokens))!r}; metrics of generated texts compare "
        "with the text of the row"
    )
    return [line]


def references(batch: Mapping[str, Any], decoded: Sequence[Any]) -> list[Any]:
    """Return the texts of a batch's rows, or what was decoded of their tokens.

    Args:
        batch: of ``collate``; its entry ``text`` has the kept text of each sample, or "".
        decoded: one for each sample.
    """
    return [text or other for text, other in zip(batch.get("text", decoded), decoded, strict=True)]
