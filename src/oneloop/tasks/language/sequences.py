"""Samples of a language model from tokenized texts: cut to a length, packed or padded, and
collated.

A token that is not a target (of a prompt) is stored as its bitwise complement, so that one array
holds both kinds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.data.order import Order, Ordered
from oneloop.data.packing import Bucketed, packed
from oneloop.data.rows.cached_arrays import Ragged

IGNORE = -100  # ignored target

Overlong = Literal["cut", "split", "drop"]


@dataclass(frozen=True)
class Spans:
    """Samples as ranges of an array of tokens; each has at most ``length + 1`` tokens and at least
    one target."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    length: int  # maximum number of input tokens (all but the last)
    texts: NDArray[np.int64]  # text index of each sample
    overlong: int  # number of texts that were cut, split or dropped
    without: int  # number of samples without a target, which are dropped
    whole: int  # number of texts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[index] : self.stops[index]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample."""
        return np.asarray(self.stops - self.starts - 1)

    def about(self, overlong: Overlong) -> list[str]:
        """Return log lines about texts that are too long or have no target."""
        action = {"cut": "truncated", "split": "split into several", "drop": "dropped"}[overlong]
        lines = [
            (
                f"{self.overlong:,} of {self.whole:,} texts are longer than {self.length:,} tokens "
                f"and are {action}"
            )
        ]
        lines = lines if self.overlong else []
        return lines + [
            f"{self.without:,} samples have no token to train on and are dropped"
        ] * bool(self.without)


def spans(texts: Ragged, length: int, overlong: Overlong) -> Spans:
    """Return the samples of tokenized texts, with at most ``length`` inputs. Longer texts are cut,
    split (adjacent samples share one token) or dropped. Raise ValueError if no sample is left."""
    stops = np.asarray(texts.ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
    text = np.arange(len(stops))
    long = stops - starts > length + 1
    if overlong == "cut":
        stops = np.minimum(stops, starts + length + 1)
    elif overlong == "drop":
        starts, stops, text = starts[~long], stops[~long], text[~long]
    else:
        pieces = np.maximum(1, -(-(stops - starts - 1) // length))
        text = np.repeat(text, pieces)
        number = np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = starts[text] + number * length
        stops = np.minimum(starts + length + 1, stops[text])
    keep = _targets(texts.values, starts, stops) > 0
    made = Spans(
        texts.values,
        starts[keep],
        stops[keep],
        length,
        text[keep],
        long.sum(),
        (~keep).sum(),
        len(long),
    )
    if not len(made):
        raise ValueError(_no_samples_message(texts, made, overlong))
    return made


def _no_samples_message(texts: Ragged, made: Spans, overlong: Overlong) -> str:
    trained = np.flatnonzero(np.asarray(texts.values) >= 0)
    if not len(trained):
        return (
            f"none of {made.whole:,} texts has a token to train on: no assistant message, no "
            "completion"
        )
    if overlong == "drop" and made.overlong == made.whole:
        return (
            f"all {made.whole:,} texts are longer than {made.length:,} tokens; increase the "
            "length, or truncate them"
        )
    ends = np.asarray(texts.ends)
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    text = np.searchsorted(ends, trained, side="right")
    first = int((trained - starts[text]).min())
    message = f"none of {made.whole:,} texts has a token to train on within {made.length:,} tokens"
    return f"{message}; the first one is token {first:,}: raise the length"


def _targets(
    values: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    counts = np.zeros(len(starts), dtype=np.int64)
    nonempty = np.flatnonzero(stops - starts > 1)
    if len(nonempty):
        edges = np.stack([starts[nonempty] + 1, stops[nonempty]], axis=1).ravel()
        is_target = np.append(values >= 0, False)  # so that the end is a valid edge
        counts[nonempty] = np.add.reduceat(is_target, edges, dtype=np.int64)[::2]
    return counts


class Padded:
    """Samples of one span each (tokens and complements); in training the samples of a step have
    similar lengths."""

    def __init__(self, spans: Spans, content: dict[str, Any] | None) -> None:
        self.spans, self.content = spans, content

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.spans[index]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample."""
        return self.spans.lengths

    def order(self, *, seed: int, batch: int) -> Ordered:
        """Return an order by length within a few steps; it depends on seed, epoch and global batch
        size."""
        return Bucketed(self.spans.lengths, seed=seed, batch=batch)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the texts' content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}

    def about(self) -> str:
        """Return a log line about the sample lengths."""
        lengths = self.lengths
        return (
            f"{len(self):,} samples of {lengths.mean():.0f} tokens on average, {lengths.max():,} "
            "at most, padded"
        )


class Prompts(Padded):
    """Prompts, one text each, in order; of a prompt longer than ``length`` only the end is kept.
    Known answers are targets; the last token is not an input."""

    def __init__(self, texts: Ragged, length: int, content: dict[str, Any] | None) -> None:
        stops = np.asarray(texts.ends, dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
        cut = int((stops - starts > length + 1).sum())
        super().__init__(
            Spans(texts.values, starts, stops, length, np.arange(len(stops)), cut, 0, len(stops)),
            content,
        )
        cut_ = f"{cut:,} of {len(stops):,} rows are longer than {length:,} tokens"
        self.warning = f"{cut_}: only the end of each prompt is used, without metrics" * bool(cut)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        tokens, length = super().__getitem__(index), self.spans.length
        if len(tokens) <= length + 1:
            return tokens
        targets = np.flatnonzero(tokens >= 0)
        prompt = tokens[: targets[0] if len(targets) else -1]
        return np.append(prompt[-length:], np.int32(~0))


class Packed:
    """Samples of several spans each, packed once by best-fit decreasing."""

    def __init__(self, spans: Spans, content: dict[str, Any] | None) -> None:
        self.spans, self.content = spans, content
        self.bins = packed(spans.lengths, spans.length)
        # maximum number of documents per row
        self.most = int(np.diff(self.bins.ends, prepend=0).max())

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> list[NDArray[np.int32]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return [self.spans[member] for member in self.bins[index].tolist()]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample: all are equal."""
        return np.full(len(self), self.spans.length)

    def order(self, *, seed: int, batch: int) -> Ordered:
        return Order(len(self), seed=seed)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the texts' content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}

    def about(self) -> str:
        """Return a log line about how full the rows are."""
        full = self.spans.lengths.sum() / (len(self) * self.spans.length)
        packed_ = (
            f"{len(self.spans):,} documents packed into {len(self):,} samples of "
            f"{self.spans.length:,} tokens"
        )
        return (
            f"{packed_}, {100 * full:.1f} % full, at most {self.most} per sample; none attends to "
            "another"
        )


def collated(samples: Sequence[Any], *, width: int = 0, most: int = 1) -> dict[str, Tensor]:
    """Return one batch: ``input`` and ``target`` of shape (samples, ``width``; 0: the longest), and
    the share of ``padding``. Single spans add their ``length``. Packed rows (at most ``most``
    spans) add ``position``, ``document`` (number) and ``cuts``, int32: document starts in all rows
    concatenated. Padding is a separate document."""
    rows = [sample if isinstance(sample, list) else [sample] for sample in samples]
    width = width or max(sum(len(span) - 1 for span in row) for row in rows)
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    target = np.full((len(rows), width), IGNORE, dtype=np.int64)
    position, document = np.zeros_like(inputs), np.zeros((len(rows), width), dtype=np.int32)
    cuts, real_tokens = list[int](), 0
    for number, row in enumerate(rows):
        start = 0
        for span in [*row, None]:
            size = width - start if span is None else len(span) - 1
            if not size:
                continue
            columns = slice(start, start + size)
            if span is not None:
                inputs[number, columns] = np.where(span[:-1] < 0, ~span[:-1], span[:-1])
                target[number, columns] = np.where(span[1:] < 0, IGNORE, span[1:])
                real_tokens += size
            position[number, columns] = np.arange(size)
            document[number, columns] = len(cuts)
            cuts.append(number * width + start)
            start += size
    batch: dict[str, NDArray[Any]] = {"input": inputs, "target": target}
    if isinstance(samples[0], list):
        cuts += [len(rows) * width] * (len(rows) * (most + 1) + 1 - len(cuts))
        batch |= {
            "position": position,
            "document": document,
            "cuts": np.array(cuts, dtype=np.int32),
        }
    else:
        batch["length"] = np.array([len(row[0]) - 1 for row in rows])
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    return tensors | {"padding": torch.tensor(1 - real_tokens / inputs.size)}
