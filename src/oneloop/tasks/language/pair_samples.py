"""Samples of pairs of answers: packed or padded, always in one micro-batch, and collated.

Both sides are two documents of one packed row, or two adjacent rows of a padded batch.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.data.order import Ordered, StoredOrder
from oneloop.tasks.frozen.outputs import FrozenOutputs
from oneloop.tasks.language.documents import Documents
from oneloop.tasks.language.packing import Bucketed, packed
from oneloop.tasks.language.sequences import collated, ranges
from oneloop.tasks.rows.cached_arrays import Ragged

RECORD = np.dtype([("logp", "<f8")])
"""what is stored of a position: the log-probability of the next token, in nats"""
_HEAD = 2  # numbers before the tokens of a pair


class Pairs:
    """Pairs of answers as two documents each.

    Args:
        pairs: arrays of :func:`oneloop.tasks.language.pairs.encoded_pair`.
        length: maximum number of input tokens of a side.
        content: a key of the pairs' content; None: unknown.

    Raises:
        ValueError: no pair is left.
    """

    def __init__(self, pairs: Ragged, length: int, content: dict[str, Any] | None) -> None:
        # Leave out the pairs that were dropped, which are empty arrays.
        starts, stops = ranges(pairs)
        kept = np.flatnonzero(stops > starts)
        if not len(kept):
            raise ValueError(
                f"all {len(stops):,} pairs are longer than {length:,} tokens; raise task.length, "
                "or set task.overlong cut"
            )
        starts = starts[kept]
        stops = stops[kept]

        # A pair begins with the length of its chosen side, and the bits of its margin.
        begin = starts + _HEAD
        middle = begin + pairs.values[starts]
        self.margins = np.ascontiguousarray(pairs.values[starts + 1]).view(np.float32)
        self.documents = Documents(
            pairs.values,
            np.stack([begin, middle], axis=1).ravel(),
            np.stack([middle, stops], axis=1).ravel(),
        )
        self.length = length
        self.content = content
        self.outputs: FrozenOutputs | None = None

    def pair(self, number: int) -> list[Any]:
        """Return both spans of a pair."""
        return [self.documents[2 * number], self.documents[2 * number + 1]]

    def _recorded(self, number: int) -> list[Any]:
        """Return both spans of a pair; with their frozen records, if the task needs any."""
        if self.outputs is None:
            return self.pair(number)
        return [*self.pair(number), self.outputs[2 * number], self.outputs[2 * number + 1]]

    def freeze(self) -> FrozenOutputs:
        """Add a record of a frozen model for each token that has a next one, in any answer or
        prompt: another mask of the targets needs the same records."""
        lengths = self.documents.lengths
        self.outputs = FrozenOutputs(
            RECORD,
            counts=lengths - 1,
            lengths=lengths,
            content=self.documents.digest(marks=False),
        )
        return self.outputs

    @cached_property
    def pair_lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of both sides of each pair."""
        return np.asarray(self.documents.lengths.reshape(-1, 2).sum(1) - 2)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the pairs' content; None if it is unknown."""
        return self.content and {"samples": len(self.pair_lengths), **self.content}

    def about(self) -> str:
        """Return a log line about the pairs."""
        lengths = self.pair_lengths
        return f"{len(lengths):,} pairs of {lengths.mean():.0f} tokens on average"


class PaddedPairs(Pairs):
    """The same, one pair per sample. In training the samples of a step have similar lengths."""

    def __len__(self) -> int:
        return len(self.pair_lengths)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._recorded(index)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample."""
        return self.pair_lengths

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return an order by length within a few steps."""
        if not shuffle:
            return StoredOrder(len(self))
        return Bucketed(self.lengths, seed=seed, batch=batch)


class PackedPairs(Pairs):
    """Samples of several pairs each, packed once by best-fit decreasing into 2 x length tokens."""

    def __init__(self, pairs: Ragged, length: int, content: dict[str, Any] | None) -> None:
        super().__init__(pairs, length, content)
        self.bins = packed(self.pair_lengths, 2 * length)
        # The maximum number of pairs per row.
        self.most = int(np.diff(self.bins.ends, prepend=0).max())

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return [self._recorded(number) for number in self.bins[index].tolist()]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample: all are equal."""
        return np.full(len(self), 2 * self.length)

    def about(self) -> str:
        """Return a log line about how full the rows are."""
        full = self.pair_lengths.sum() / (len(self) * 2 * self.length)
        return (
            f"{super().about()}; packed into {len(self):,} samples of {2 * self.length:,} tokens, "
            f"{100 * full:.1f} % full, at most {self.most} pairs per sample"
        )


def collated_pairs(samples: Sequence[Any], *, width: int = 0, most: int = 1) -> dict[str, Tensor]:
    """Return one batch of pairs, or of packed rows (lists of pairs).

    Args:
        samples: pairs, or lists of pairs; a pair is its two spans, and perhaps their records.
        width: input tokens of a packed row; 0: the pairs are padded.
        most: maximum number of pairs of a packed row.

    Returns:
        As :func:`oneloop.tasks.language.sequences.collated`. Padded pairs have two rows each,
        chosen first. Packed rows add ``chosen`` and ``rejected``, (rows, most): the numbers of the
        documents of each pair in ``document``, or -1. With records, ``reference`` has their
        log-probabilities, as of :func:`aligned`.
    """
    # Lay out the spans of both sides one after the other.
    rows = [sample if width else [sample] for sample in samples]
    spans: list[Any] = []
    records: list[list[NDArray[Any]]] = []
    for row in rows:
        sides = [side for pair in row for side in pair[:2]]
        of_row = [side for pair in row for side in pair[2:4]]
        if width:
            spans.append(sides)
            records.append(of_row)
        else:
            spans += sides
            records += [[one] for one in of_row]
    batch = collated(spans, width=width, most=2 * most)

    # Number the documents of each pair, as collated() numbers them.
    if width:
        numbers = np.full((len(rows), most, 2), -1, dtype=np.int32)
        first = 0
        for number, row in enumerate(rows):
            documents = np.arange(first, first + 2 * len(row), dtype=np.int32)
            numbers[number, : len(row)] = documents.reshape(-1, 2)
            used = sum(len(side) - 1 for pair in row for side in pair[:2])
            first += 2 * len(row) + int(used < width)
        batch["chosen"] = torch.from_numpy(np.ascontiguousarray(numbers[..., 0]))
        batch["rejected"] = torch.from_numpy(np.ascontiguousarray(numbers[..., 1]))
    if records and records[0]:
        batch["reference"] = aligned(records, batch["target"].shape, "logp")
    return batch


def aligned(records: Sequence[Sequence[NDArray[Any]]], shape: Any, name: str) -> Tensor:
    """Return a field of records at the positions of their tokens, 0 at others.

    A number is the sum of two of float32, which runs in float64 add exactly: no GPU of Apple has
    float64.

    Args:
        records: of each row, document after document.
        shape: of the batch's target.
        name: of the field.

    Returns:
        (rows, width, 2), float32.
    """
    values = np.zeros((*shape, 2), dtype=np.float32)
    for number, row in enumerate(records):
        joined = np.concatenate([one[name] for one in row])
        values[number, : len(joined), 0] = joined
        values[number, : len(joined), 1] = joined - values[number, : len(joined), 0]
    return torch.from_numpy(values)


def answer_sums(values: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sums of a value of each token over both sides of each pair.

    They are deterministic: without atomic additions, and without matrix products (TF32).

    Args:
        values: (rows, width).
        batch: of :func:`collated_pairs`.

    Returns:
        Two tensors (pairs,). Packed rows give (rows x most,), and 0 for an empty place.
    """
    if "chosen" not in batch:
        sums = values.sum(1)
        return sums[0::2], sums[1::2]
    document = batch["document"][:, None]
    sides = []
    for side in ("chosen", "rejected"):
        inside = document == batch[side][:, :, None]
        sides.append((values[:, None] * inside).sum(-1).flatten())
    return sides[0], sides[1]


def pair_mask(batch: dict[str, Tensor]) -> Tensor:
    """Return which entries of :func:`answer_sums` are pairs, bool."""
    if "chosen" in batch:
        return batch["chosen"].flatten() >= 0
    return torch.ones(len(batch["target"]) // 2, dtype=torch.bool, device=batch["target"].device)
