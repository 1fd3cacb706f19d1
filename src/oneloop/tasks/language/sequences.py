"""Texts as samples of a language model: cut to a length, packed into rows or padded, and collated.

A token that is no target (a prompt) is stored as its bitwise complement, so that one array holds both.
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

IGNORE = -100  # a target that does not count

Overlong = Literal["cut", "split", "drop"]


@dataclass(frozen=True)
class Spans:
    """Samples as places in an array of tokens: each has at most ``length + 1`` of them, of which one at least is a
    target."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    length: int  # tokens that a model reads of one at most: all but the last
    texts: NDArray[np.int64]  # which text each is of
    overlong: int  # texts that were cut, split or dropped
    without: int  # samples without a target, which are left out
    whole: int  # texts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.tokens[self.starts[index] : self.stops[index]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens that a model reads of each."""
        return np.asarray(self.stops - self.starts - 1)

    def about(self, overlong: Overlong) -> list[str]:
        """What became of texts that are too long or hold no target, for a person."""
        action = {"cut": "cut there", "split": "split into several", "drop": "left out"}[overlong]
        lines = [f"{self.overlong:,} of {self.whole:,} texts are longer than {self.length:,} tokens, and {action}"]
        lines = lines if self.overlong else []
        return lines + [f"{self.without:,} samples hold no token to be trained, and are left out"] * bool(self.without)


def spans(texts: Ragged, length: int, overlong: Overlong) -> Spans:
    """Return the samples of texts (tokens; complements are no targets) of ``length`` inputs. Of longer texts only the
    beginning is kept, or they are split (with one shared token), or dropped. Raises ValueError if nothing is left."""
    stops = np.asarray(texts.ends, dtype=np.int64)
    starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
    of = np.arange(len(stops))
    long = stops - starts > length + 1
    if overlong == "cut":
        stops = np.minimum(stops, starts + length + 1)
    elif overlong == "drop":
        starts, stops, of = starts[~long], stops[~long], of[~long]
    else:
        pieces = np.maximum(1, -(-(stops - starts - 1) // length))
        of = np.repeat(of, pieces)
        number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = starts[of] + number * length
        stops = np.minimum(starts + length + 1, stops[of])
    keep = _targets(texts.values, starts, stops) > 0
    made = Spans(texts.values, starts[keep], stops[keep], length, of[keep], long.sum(), (~keep).sum(), len(long))
    if not len(made):
        raise ValueError(_nothing(texts, made, overlong))
    return made


def _nothing(texts: Ragged, made: Spans, overlong: Overlong) -> str:
    trained = np.flatnonzero(np.asarray(texts.values) >= 0)
    if not len(trained):
        return f"none of {made.whole:,} texts has a token to train on: no assistant message, no completion"
    if overlong == "drop" and made.overlong == made.whole:
        return (
            f"all of {made.whole:,} texts are longer than {made.length:,} tokens; increase the length, or truncate them"
        )
    ends = np.asarray(texts.ends)
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    text = np.searchsorted(ends, trained, side="right")
    least = int((trained - starts[text]).min())
    none = f"none of {made.whole:,} texts has a token to train on within {made.length:,} tokens"
    return f"{none}; the first one is token {least:,}: raise the length"


def _targets(values: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.int64]:
    found = np.zeros(len(starts), dtype=np.int64)
    some = np.flatnonzero(stops - starts > 1)
    if len(some):
        edges = np.stack([starts[some] + 1, stops[some]], axis=1).ravel()
        known = np.append(values >= 0, False)  # so that the end of all is an edge too
        found[some] = np.add.reduceat(known, edges, dtype=np.int64)[::2]
    return found


class Padded:
    """Samples of one span each, as tokens and complements; in training those of a step have similar length."""

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
        """Tokens that a model reads of each."""
        return self.spans.lengths

    def order(self, *, seed: int, batch: int) -> Ordered:
        """By length within a few steps: a function of seed, epoch and the global batch."""
        return Bucketed(self.spans.lengths, seed=seed, batch=batch)

    def fingerprint(self) -> dict[str, Any] | None:
        """What the texts are, by content; None where they do not tell."""
        return self.content and {"samples": len(self), **self.content}

    def about(self) -> str:
        """How long they are, for a person."""
        lengths = self.lengths
        return f"{len(self):,} samples of {lengths.mean():.0f} tokens on average, {lengths.max():,} at most, padded"


class Asked(Padded):
    """Prompts, one text each, in order; of one longer than ``length`` only the end is kept. Targets are the known
    answer; the last token is never read."""

    def __init__(self, texts: Ragged, length: int, content: dict[str, Any] | None) -> None:
        stops = np.asarray(texts.ends, dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), stops])[:-1]
        cut = int((stops - starts > length + 1).sum())
        super().__init__(Spans(texts.values, starts, stops, length, np.arange(len(stops)), cut, 0, len(stops)), content)
        cut_ = f"{cut:,} of {len(stops):,} rows are longer than {length:,} tokens"
        self.warning = f"{cut_}: the end of their prompts is answered, without metrics" * bool(cut)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        tokens, length = super().__getitem__(index), self.spans.length
        if len(tokens) <= length + 1:
            return tokens
        known = np.flatnonzero(tokens >= 0)
        prompt = tokens[: known[0] if len(known) else -1]
        return np.append(prompt[-length:], np.int32(~0))


class Packed:
    """Samples of several spans each: bins by best fit decreasing, packed once."""

    def __init__(self, spans: Spans, content: dict[str, Any] | None) -> None:
        self.spans, self.content = spans, content
        self.bins = packed(spans.lengths, spans.length)
        self.most = int(np.diff(self.bins.ends, prepend=0).max())  # documents of a row

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> list[NDArray[np.int32]]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return [self.spans[member] for member in self.bins[index].tolist()]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens that a model reads of each: all are of one length."""
        return np.full(len(self), self.spans.length)

    def order(self, *, seed: int, batch: int) -> Ordered:
        return Order(len(self), seed=seed)

    def fingerprint(self) -> dict[str, Any] | None:
        """What the texts are, by content; None where they do not tell."""
        return self.content and {"samples": len(self), **self.content}

    def about(self) -> str:
        """How full the rows are, for a person."""
        full = self.spans.lengths.sum() / (len(self) * self.spans.length)
        packed_ = f"{len(self.spans):,} documents packed into {len(self):,} samples of {self.spans.length:,} tokens"
        return f"{packed_}, {100 * full:.1f} % full, {self.most} in one at most; none sees another"


def collated(samples: Sequence[Any], *, width: int = 0, most: int = 1) -> dict[str, Tensor]:
    """Return one batch: ``input`` and ``target`` of shape (samples, ``width``; 0: the longest), the share of
    ``padding``; of spans their ``length``; of rows of at most ``most`` spans the ``position`` in the ``document``, its
    number, and ``cuts``, int32: where documents begin in all rows concatenated. Padding is a document of its own."""
    rows = [sample if isinstance(sample, list) else [sample] for sample in samples]
    width = width or max(sum(len(one) - 1 for one in row) for row in rows)
    given = np.zeros((len(rows), width), dtype=np.int64)
    target = np.full((len(rows), width), IGNORE, dtype=np.int64)
    position, document = np.zeros_like(given), np.zeros((len(rows), width), dtype=np.int32)
    cuts, filled = list[int](), 0
    for number, row in enumerate(rows):
        at = 0
        for one in [*row, None]:
            size = width - at if one is None else len(one) - 1
            if not size:
                continue
            here = slice(at, at + size)
            if one is not None:
                given[number, here] = np.where(one[:-1] < 0, ~one[:-1], one[:-1])
                target[number, here] = np.where(one[1:] < 0, IGNORE, one[1:])
                filled += size
            position[number, here] = np.arange(size)
            document[number, here] = len(cuts)
            cuts.append(number * width + at)
            at += size
    batch: dict[str, NDArray[Any]] = {"input": given, "target": target}
    if isinstance(samples[0], list):
        cuts += [len(rows) * width] * (len(rows) * (most + 1) + 1 - len(cuts))
        batch |= {"position": position, "document": document, "cuts": np.array(cuts, dtype=np.int32)}
    else:
        batch["length"] = np.array([len(row[0]) - 1 for row in rows])
    made = {name: torch.from_numpy(array) for name, array in batch.items()}
    return made | {"padding": torch.tensor(1 - filled / given.size)}
