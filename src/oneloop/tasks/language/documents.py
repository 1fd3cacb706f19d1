"""Documents: ranges of one long array of tokens, and a hash of all of them."""

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

_AT_ONCE = 1 << 22  # tokens


class Documents:
    """Token arrays of documents: ranges of one long array.

    Args:
        tokens: the array; complements are not targets.
        starts: (documents,), first token of each document.
        stops: (documents,), end of each document.
    """

    def __init__(
        self, tokens: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        self.tokens = tokens
        self.starts = starts
        self.stops = stops

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[number] : self.stops[number]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document."""
        return np.asarray(self.stops - self.starts, dtype=np.int64)

    def digest(self, *, marks: bool) -> str:
        """Return a hash of all token ids in order, and of the ends of the documents.

        Args:
            marks: whether it also depends on which tokens are targets.
        """
        state = xxh3_128(self.lengths.astype("<i8").tobytes())
        first = 0
        ends = np.cumsum(self.lengths)
        while first < len(self):
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + _AT_ONCE, side="right"))
            several = range(first, max(last, first + 1))
            part = np.concatenate([self[number] for number in several])
            values = part if marks else token_ids(part)
            state.update(np.ascontiguousarray(values, "<i4").tobytes())
            first = several.stop
        return state.hexdigest()


def token_ids(span: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the token ids of a span, also of tokens that are not targets."""
    return np.where(span < 0, ~span, span)
