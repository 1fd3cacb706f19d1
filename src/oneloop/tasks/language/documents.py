"""The tokens of documents, and a hash of all of them."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_AT_ONCE = 1 << 22  # tokens


def token_hash(
    document: Callable[[int], NDArray[np.int32]], sizes: NDArray[np.int64], *, marks: bool
) -> str:
    """Return a hash of all token ids in order, and of the ends of the documents.

    Args:
        document: returns the tokens of a document.
        sizes: (documents,), number of tokens of each document.
        marks: whether the hash also depends on which tokens are targets.
    """
    from xxhash import xxh3_128

    state = xxh3_128(sizes.astype("<i8").tobytes())
    first = 0
    ends = np.cumsum(sizes)
    while first < len(sizes):
        before = int(ends[first - 1]) if first else 0
        last = int(np.searchsorted(ends, before + _AT_ONCE, side="right"))
        several = range(first, max(last, first + 1))
        part = np.concatenate([document(number) for number in several])
        values = part if marks else token_ids(part)
        state.update(np.ascontiguousarray(values, "<i4").tobytes())
        first = several.stop
    return state.hexdigest()


def token_ids(span: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the token ids of a span, also of tokens that are not targets."""
    return np.where(span < 0, ~span, span)
