"""Samples of a language model from tokenized texts: cut, packed or padded, and collated.

A token that is not a target (of a prompt) is stored as its bitwise complement, so that one array
holds both kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.data.order import Ordered, StoredOrder
from oneloop.tasks.frozen.outputs import FrozenOutputs
from oneloop.tasks.language.documents import Documents, token_ids
from oneloop.tasks.language.packing import Bucketed, packed
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.text_notes import cut_notes

IGNORE = -100  # ignored target

Overlong = Literal["cut", "split", "drop"]


def _same(span: NDArray[np.int32]) -> Any:
    """Return a span as it is."""
    return span


@dataclass(frozen=True)
class Spans:
    """Samples as ranges of an array of tokens, each with at least one target."""

    # the samples: each has at most ``length + 1`` tokens
    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    length: int  # maximum number of input tokens (all but the last)
    texts: NDArray[np.int64]  # text index of each sample
    cut: NDArray[np.bool_]  # whether the text of each sample continues after it

    notes: Sequence[str] = ()  # log lines about the texts
    kept: Mapping[int, str] = field(default_factory=dict)  # texts of first answers, by start
    special: int = 0  # number of special tokens that ``draw`` adds to each sample
    draw: Callable[[NDArray[np.int32]], Any] = _same  # makes a sample of a range of tokens

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Any:
        return self.draw(self.tokens[self.starts[index] : self.stops[index]])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample."""
        return np.asarray(self.stops - self.starts - 1 + self.special)


def spans(texts: Ragged, length: int, overlong: Overlong, *, special: int = 0) -> Spans:
    """Return the samples of tokenized texts.

    Args:
        texts: tokens of each text; complements are not targets.
        length: maximum number of input tokens of a sample.
        overlong: cut longer texts, split them (adjacent samples share one token), or drop them.
        special: how many of the input tokens are special ones, which ``texts`` do not have.

    Raises:
        ValueError: no sample is left.
    """
    most = length
    length -= special
    starts, stops = ranges(texts)
    ends = stops
    text = np.arange(len(stops))
    long = stops - starts > length + 1
    cut = np.minimum(stops, starts + length + 1)
    lost = int((_targets(texts.values, cut - 1, stops) > 0).sum())
    if overlong == "cut":
        stops = cut
    elif overlong == "drop":
        if long.all():
            raise ValueError(
                f"all {len(long):,} texts are longer than {most:,} tokens; increase the length, or "
                "truncate them"
            )
        starts = starts[~long]
        stops = stops[~long]
        text = text[~long]
    else:
        # The last target of a piece is the first input of the next one.
        pieces = np.maximum(1, -(-(stops - starts - 1) // length))
        text = np.repeat(text, pieces)
        number = np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = starts[text] + number * length
        stops = np.minimum(starts + length + 1, stops[text])

    # Keep the samples that have a target.
    keep = _targets(texts.values, starts, stops) > 0
    if not keep.any():
        raise ValueError(_why_empty(texts, most))

    # The first token of a text is not a target.
    limit = f"{most:,} tokens" if special else f"{most + 1:,} tokens ({most:,} targets)"
    what = f"texts are longer than {limit}"
    lines = cut_notes(long.sum(), len(long), what, overlong, lost=lost)
    if not keep.all():
        lines.append(f"{(~keep).sum():,} samples have no token to train on and are dropped")
    return Spans(
        tokens=texts.values,
        starts=starts[keep],
        stops=stops[keep],
        length=most,
        texts=text[keep],
        cut=stops[keep] < ends[text[keep]],
        notes=[*texts.notes, *lines],
        kept=texts.texts,
        special=special,
    )


def ranges(texts: Ragged) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and the stop of each text in ``texts.values``."""
    stops = np.asarray(texts.ends, dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), stops])[:-1], stops


def _why_empty(texts: Ragged, length: int) -> str:
    """Return the error message if no sample is left."""
    total = f"{len(texts.ends):,} texts"
    # Find the positions of all targets within their texts.
    starts, stops = ranges(texts)
    trained = np.flatnonzero(np.asarray(texts.values) >= 0)
    trained -= starts[np.searchsorted(stops, trained, side="right")]
    if not len(trained):
        return f"none of {total} has a token to train on: no assistant message, no completion"
    return (
        f"none of {total} has a token to train on within {length:,} tokens; "
        f"the first one is token {trained.min():,}: raise the length"
    )


def _targets(
    values: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of targets of each range; its first token is only an input."""
    counts = np.zeros(len(starts), dtype=np.int64)
    nonempty = np.flatnonzero(stops - starts > 1)
    if len(nonempty):
        # reduceat also sums from each stop to the next start: take every second sum.
        edges = np.stack([starts[nonempty] + 1, stops[nonempty]], axis=1).ravel()
        is_target = np.append(values >= 0, False)  # so that the end is a valid edge
        counts[nonempty] = np.add.reduceat(is_target, edges, dtype=np.int64)[::2]
    return counts


def frozen_targets(samples: "Pieces | Packed", record: np.dtype[Any]) -> FrozenOutputs:
    """Add a record of a frozen model for each target of each span, and return the records.

    A sample is then a span with its records, or a list of such pairs.
    """
    spans = samples.spans
    documents = Documents(spans.tokens, spans.starts, spans.stops)
    samples.outputs = FrozenOutputs(
        record,
        counts=_targets(spans.tokens, spans.starts, spans.stops),
        lengths=documents.lengths,
        content=documents.digest(marks=True),
    )
    return samples.outputs


class Pieces:
    """Samples of one span each (tokens and complements)."""

    def __init__(self, spans: Spans, content: dict[str, Any] | None) -> None:
        """Use these samples; ``content`` is a key of the texts' content (None: unknown)."""
        self.spans = spans
        self.content = content
        self.outputs: FrozenOutputs | None = None

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        sample = self.spans[index]
        if self.outputs is not None:
            sample = (sample, self.outputs[index])
        text = self.spans.kept.get(self.spans.starts[index])
        return (sample, text) if text else sample

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the texts' content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}


class Padded(Pieces):
    """The same. In training the samples of a step have similar lengths."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample."""
        return self.spans.lengths

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return an order by length within a few steps.

        It depends on seed, epoch and global batch size.
        """
        if not shuffle:
            return StoredOrder(len(self))
        return Bucketed(self.spans.lengths, seed=seed, batch=batch)

    @property
    def cut_references(self) -> str:
        """Why generated texts cannot be compared: first answers are cut; else empty."""
        spans = self.spans
        count = 0
        for index in np.flatnonzero(spans.cut):
            stop = spans.stops[index]
            is_target = spans.tokens[spans.starts[index] + 1 : stop] >= 0
            first = int(np.argmax(is_target))
            # The answer is cut if it reaches the end of the sample, and the text has more of it.
            reaches_end = is_target[first:].all()
            if reaches_end and spans.tokens[stop] >= 0:
                count += 1
        if not count:
            return ""
        return (
            f"the answers of {count:,} of {len(self):,} samples are cut at {spans.length:,} "
            "tokens; raise task.length, or set task.overlong drop"
        )

    def about(self) -> str:
        """Return a log line about the sample lengths."""
        lengths = self.lengths
        return (
            f"{len(self):,} samples of {lengths.mean():.0f} tokens on average, {lengths.max():,} "
            "at most, padded"
        )


class Prompts(Padded):
    """Prompts, one text each, in order; of a prompt longer than ``length`` only the end is kept.

    Known answers are targets; the last token is not an input.
    """

    def __init__(self, texts: Ragged, length: int, content: dict[str, Any] | None) -> None:
        """Use these texts, with at most ``length`` input tokens each."""
        starts, stops = ranges(texts)
        cut = int((stops - starts > length + 1).sum())
        prompts = Spans(
            tokens=texts.values,
            starts=starts,
            stops=stops,
            length=length,
            texts=np.arange(len(stops)),
            cut=np.zeros(len(stops), dtype=bool),
            kept=texts.texts,
        )
        super().__init__(prompts, content)
        self.warning = ""
        if cut:
            self.warning = (
                f"{cut:,} of {len(stops):,} rows are longer than {length:,} tokens: only the end "
                "of each prompt is used, without metrics"
            )

    def __getitem__(self, index: int) -> Any:
        tokens = self.spans[index]
        length = self.spans.length
        if len(tokens) <= length + 1:
            return super().__getitem__(index)
        # Keep the end of the prompt, without the answer; ~0 stands for the token that is no input.
        targets = np.flatnonzero(tokens >= 0)
        end = targets[0] if len(targets) else -1
        return np.append(tokens[:end][-length:], np.int32(~0))


class Packed:
    """Samples of several spans each, packed once by best-fit decreasing."""

    def __init__(self, spans: Spans, content: dict[str, Any] | None) -> None:
        """Pack these samples; ``content`` is a key of the texts' content (None: unknown)."""
        self.spans = spans
        self.content = content
        self.outputs: FrozenOutputs | None = None
        self.bins = packed(spans.lengths, spans.length)
        # The maximum number of documents per row.
        self.most = int(np.diff(self.bins.ends, prepend=0).max())

    def __len__(self) -> int:
        return len(self.bins)

    def __getitem__(self, index: int) -> list[Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        members = self.bins[index].tolist()
        if self.outputs is None:
            return [self.spans[member] for member in members]
        return [(self.spans[member], self.outputs[member]) for member in members]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of input tokens of each sample: all are equal."""
        return np.full(len(self), self.spans.length)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the texts' content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}

    def about(self) -> str:
        """Return a log line about how full the rows are."""
        full = self.spans.lengths.sum() / (len(self) * self.spans.length)
        return (
            f"{len(self.spans):,} documents packed into {len(self):,} samples of "
            f"{self.spans.length:,} tokens, {100 * full:.1f} % full, at most {self.most} per "
            "sample; none attends to another"
        )


def collated(samples: Sequence[Any], *, width: int = 0, most: int = 1) -> dict[str, Tensor]:
    """Return one batch of spans, or of packed rows (lists of spans).

    Args:
        samples: spans with tokens and complements, or lists of spans.
        width: input tokens of a row (0: those of the longest row).
        most: maximum number of spans of a packed row.

    Returns:
        ``input`` and ``target``, int64 of shape (samples, width), and the share of ``padding``.
        Single spans add their ``length``. Packed rows add ``position`` and ``document`` (number)
        of each token, and ``cuts``, int32: document starts in all rows concatenated. Padding is a
        separate document.
    """
    # Allocate the arrays; a row of one span is a list of one.
    rows = [sample if isinstance(sample, list) else [sample] for sample in samples]
    if not width:
        width = max(sum(map(len, row)) - len(row) for row in rows)
    inputs = np.zeros((len(rows), width), dtype=np.int64)
    target = np.full((len(rows), width), IGNORE, dtype=np.int64)
    position = np.zeros_like(inputs)
    document = np.zeros((len(rows), width), dtype=np.int32)
    cuts = list[int]()
    real_tokens = 0

    # Write one document after the other.
    for number, row in enumerate(rows):
        start = 0
        for span in [*row, None]:
            # None stands for the padding, which is a document of its own.
            if span is None:
                size = width - start
            else:
                size = len(span) - 1
            if not size:
                continue
            columns = slice(start, start + size)
            if span is not None:
                inputs[number, columns] = token_ids(span[:-1])
                target[number, columns] = np.where(span[1:] < 0, IGNORE, span[1:])
                real_tokens += size
            position[number, columns] = np.arange(size)
            document[number, columns] = len(cuts)
            cuts.append(number * width + start)
            start += size

    batch = {"input": torch.from_numpy(inputs), "target": torch.from_numpy(target)}
    if isinstance(samples[0], list):
        # Fill up with the total length, so that ``cuts`` of all batches have the same shape.
        cuts += [len(rows) * width] * (len(rows) * (most + 1) + 1 - len(cuts))
        batch["position"] = torch.from_numpy(position)
        batch["document"] = torch.from_numpy(document)
        batch["cuts"] = torch.from_numpy(np.array(cuts, dtype=np.int32))
    else:
        batch["length"] = torch.from_numpy(np.array([len(row[0]) - 1 for row in rows]))
    batch["padding"] = torch.tensor(1 - real_tokens / inputs.size)
    return batch
