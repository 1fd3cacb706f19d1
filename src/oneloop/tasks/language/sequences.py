"""Samples of token tasks: groups of documents in one array of tokens, packed or padded.

A padded text is a group of one document. A pair of answers, and a source with its target, are
groups of two. A packed row has several groups. A token that is not a target (of a prompt) is stored
as its bitwise complement, so that one array holds both kinds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.data.order import Order, Ordered, StoredOrder
from oneloop.tasks.frozen.outputs import FrozenOutputs
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.packing import Bucketed, packed
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.text_notes import cut_notes

IGNORE = -100  # ignored target
HEAD = 2  # numbers before the tokens of a pair: the tokens of its first document, and any other

Overlong = Literal["cut", "split", "drop"]
Measure = Callable[[NDArray[np.int64]], NDArray[np.int64]]
"""returns the number of input tokens of groups from the numbers of tokens of their documents"""


class Sample(NamedTuple):
    """A sample: documents that belong together."""

    documents: Sequence[Any]  # arrays of tokens, or what ``draw`` makes of them
    is_row: bool = False  # whether they are one packed row
    records: Sequence[NDArray[Any]] = ()  # of a frozen model, of each document
    text: str = ""  # of the first answer, if its tokens do not give it back
    number: int = 0  # that belongs to the group


def input_tokens(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of input tokens of each group: all but the last of each document.

    Args:
        sizes: (groups, size), number of tokens of each document.
    """
    return np.asarray(sizes.sum(1) - sizes.shape[1])


@dataclass(eq=False, repr=False)
class Samples:
    """Groups of documents in one array; each group is a sample, or several are packed into a row.

    In training, the samples of a step have similar lengths, unless they are packed.

    Args:
        tokens: of all documents.
        starts: (documents,), first token of each document.
        stops: (documents,), end of each document.
        measure: returns the number of input tokens of each group, as :func:`input_tokens`.
        size: documents of a group.
        room: input tokens of a row, into which groups are packed; 0: each group is a sample.
        by_length: whether the samples of a step have similar lengths.
        content: a key of the content (None: unknown).
        notes: log lines about the texts.
        texts: texts of first answers that their tokens do not give back, by start of the document.
        cut: (groups,), whether the first answer or the target is cut; None: none is.
        draw: makes what a sample has of each document.
    """

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    _: KW_ONLY
    measure: InitVar[Measure] = input_tokens
    size: int = 1
    room: int = 0
    by_length: bool = True
    content: dict[str, Any] | None = None
    notes: Sequence[str] = ()
    texts: Mapping[int, str] = field(default_factory=dict)
    cut: NDArray[np.bool_] | None = None
    draw: Callable[[NDArray[np.int32]], Any] = np.asarray

    def __post_init__(self, measure: Measure) -> None:
        self.outputs: FrozenOutputs | None = None
        self.lengths = measure(self.sizes.reshape(-1, self.size))
        """number of input tokens of each group"""

        # Pack the groups once, by best-fit decreasing.
        self.members: Sequence[int] | NDArray[np.int64] = range(len(self.lengths))
        self.edges: Sequence[int] | NDArray[np.int64] = range(len(self.lengths) + 1)
        self.most = self.size  # documents of a sample, at most
        if self.room:
            self.by_length = False
            self.members, self.edges = packed(self.lengths, self.room)
            self.most *= int(np.diff(self.edges).max())

    def __len__(self) -> int:
        return len(self.edges) - 1

    def groups(self, index: int) -> Sequence[int] | NDArray[np.int64]:
        """Return the numbers of the groups of a sample."""
        return self.members[self.edges[index] : self.edges[index + 1]]

    def __getitem__(self, index: int) -> Sample:
        index = range(len(self))[index]
        numbers = list[int]()
        for group in self.groups(index):
            numbers += range(self.size * group, self.size * (group + 1))
        start = int(self.starts[numbers[0]])
        return Sample(
            documents=[self.draw(self.document(number)) for number in numbers],
            is_row=self.room > 0,
            records=[self.outputs[number] for number in numbers] if self.outputs else (),
            text=self.texts.get(start, ""),
            number=int(self.tokens[start - 1]) if self.size == 2 else 0,
        )

    def document(self, number: int) -> NDArray[np.int32]:
        """Return the tokens of a document."""
        return self.tokens[self.starts[number] : self.stops[number]]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of tokens of each document."""
        return self.stops - self.starts

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return an order by length within a few steps, unless all samples are equally long.

        It depends on seed, epoch and global batch size.
        """
        if not shuffle:
            return StoredOrder(len(self))
        if self.by_length:
            return Bucketed(self.lengths, seed=seed, batch=batch)
        return Order(len(self), seed=seed)

    def freeze(self, record: np.dtype[Any], *, targets: bool) -> FrozenOutputs:
        """Add records of a frozen model to the documents, and return the records.

        Args:
            record: what is stored for a position.
            targets: store a record for each target; else for each token that has a next one, so
                that another mask of the targets needs the same records, and is the same content.
        """
        from xxhash import xxh3_128

        # The content is all token ids in order, and the ends of the documents.
        content = xxh3_128(self.sizes.tobytes())
        for number in range(len(self.starts)):
            tokens = self.document(number)
            content.update((tokens if targets else token_ids(tokens)).data)
        counts = self.sizes - 1
        if targets:
            counts = count_targets(self.tokens, self.starts, self.stops)
        self.outputs = FrozenOutputs(
            record, counts=counts, lengths=self.sizes, content=content.hexdigest()
        )
        return self.outputs

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}

    @property
    def cut_references(self) -> str:
        """Why generated texts cannot be compared: their references are cut; else empty."""
        if self.cut is None or not self.cut.any():
            return ""
        return (
            f"the answers of {self.cut.sum():,} of {len(self):,} samples are cut; raise "
            "task.length (seq2seq: task.target_length), or set task.overlong drop"
        )

    @property
    def warning(self) -> str:
        """Lines for the user about texts that are too long or unknown; else empty."""
        return "; ".join(self.notes)

    def about(self) -> str | None:
        """Return a log line about the lengths, or about how full the rows are; None: all equal."""
        lengths = self.lengths
        what = f"{len(lengths):,} {'pairs' if self.size == 2 else 'documents'}"
        if self.by_length:
            return (
                f"{what} of {lengths.mean():.0f} tokens on average, {lengths.max():,} at most, "
                "padded"
            )
        if not self.room:
            return None
        full = lengths.sum() / (len(self) * self.room)
        return (
            f"{what} packed into {len(self):,} samples of {self.room:,} tokens, "
            f"{100 * full:.1f} % full, at most {self.most // self.size} per sample; none attends "
            "to another"
        )


def cut_texts(
    texts: Ragged, length: int, overlong: Overlong, *, special: int = 0, room: int = 0, **more: Any
) -> Samples:
    """Return the samples of tokenized texts, each with at least one target.

    Args:
        texts: tokens of each text; complements are not targets.
        length: maximum number of input tokens of a sample (all but the last).
        overlong: cut longer texts, split them (adjacent samples share one token), or drop them.
        special: how many of the input tokens are special ones, which ``texts`` do not have.
        room: see :class:`Samples`.
        more: other arguments of :class:`Samples`.

    Raises:
        ValueError: no sample is left.
    """
    most = length
    length -= special
    values = texts.values
    starts, stops = ranges(texts)
    ends = stops
    text = np.arange(len(stops))
    long = stops - starts > length + 1
    cut = np.minimum(stops, starts + length + 1)
    lost = int((count_targets(values, cut - 1, stops) > 0).sum())
    if overlong == "cut":
        stops = cut
    elif overlong == "drop":
        if long.all():
            raise ValueError(
                f"all {len(long):,} texts are longer than {most:,} tokens; increase the length, or "
                "truncate them"
            )
        text = text[~long]
        starts = starts[text]
        stops = stops[text]
    else:
        # The last target of a piece is the first input of the next one.
        pieces = np.maximum(1, -(-(stops - starts - 1) // length))
        text = np.repeat(text, pieces)
        number = np.arange(len(text)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = starts[text] + number * length
        stops = np.minimum(starts + length + 1, stops[text])

    # Keep the samples that have a target.
    targets = count_targets(values, starts, stops)
    keep = np.flatnonzero(targets)
    if not len(keep):
        raise ValueError(
            f"no token to train on in any of {len(ends):,} texts within {most:,} tokens: no "
            "assistant message, no completion, or one that begins later; raise the length"
        )
    dropped = len(targets) - len(keep)
    starts = starts[keep]
    stops = stops[keep]
    targets = targets[keep]

    # The first answer is cut if only targets follow it in the sample, and its text has more of it.
    cut = stops < ends[text[keep]]
    cut[cut] = values[stops[cut]] >= 0
    cut[cut] = count_targets(values, (stops - targets - 1)[cut], stops[cut]) == targets[cut]

    # The first token of a text is not a target.
    limit = f"{most:,} tokens" if special else f"{most + 1:,} tokens ({most:,} targets)"
    what = f"texts are longer than {limit}"
    lines = cut_notes(long.sum(), len(long), what, overlong, lost=lost)
    if dropped:
        lines.append(f"{dropped:,} samples have no token to train on and are dropped")
    return Samples(
        values,
        starts,
        stops,
        measure=lambda sizes: input_tokens(sizes) + special,
        room=room,
        notes=[*texts.notes, *lines],
        texts=texts.texts,
        cut=cut,
        **more,
    )


def cut_blocks(
    texts: Ragged, block: int, *, whole: bool, content: dict[str, Any] | None
) -> Samples:
    """Return samples of ``block + 1`` tokens, cut from the concatenated texts.

    They overlap by one token, so that every token except the first is a target once.

    Args:
        texts: tokens of each text.
        block: targets per sample.
        whole: drop a shorter last sample.
        content: a key of the texts' content (None: unknown).
    """
    targets = max(0, len(texts.values) - 1)
    starts = block * np.arange(targets // block if whole else -(-targets // block))
    stops = np.minimum(starts + block + 1, len(texts.values))
    return Samples(texts.values, starts, stops, by_length=False, content=content)


def paired(pairs: Ragged, limit: str, **more: Any) -> Samples:
    """Return pairs of documents, without those that were dropped, which are empty arrays.

    Args:
        pairs: of each pair, the tokens of its first document (their number), any number, and the
            tokens of both documents.
        limit: the longest pair that is not dropped, for messages.
        more: other arguments of :class:`Samples`.

    Raises:
        ValueError: no pair is left.
    """
    starts, stops = ranges(pairs)
    kept = np.flatnonzero(stops > starts)
    if not len(kept):
        raise ValueError(
            f"all {len(stops):,} pairs are longer than {limit}; raise it, or set task.overlong cut"
        )
    head = starts[kept]
    middle = head + HEAD + pairs.values[head]
    return Samples(
        pairs.values,
        np.stack([head + HEAD, middle], axis=1).ravel(),
        np.stack([middle, stops[kept]], axis=1).ravel(),
        size=2,
        notes=pairs.notes,
        texts={start + HEAD: text for start, text in pairs.texts.items()},
        **more,
    )


def ranges(texts: Ragged) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start and the stop of each text in ``texts.values``."""
    stops = np.asarray(texts.ends, dtype=np.int64)
    return np.append(0, stops)[:-1], stops


def count_targets(
    values: NDArray[np.int32], starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> NDArray[Any]:
    """Return the number of targets of each range; its first token is only an input."""
    # The number of targets before each token may wrap around; its differences stay right.
    before = np.zeros(len(values) + 1, np.int32)
    np.cumsum(values >= 0, dtype=np.int32, out=before[1:])
    return before[stops] - before[np.minimum(starts + 1, stops)]


def filled(rows: Sequence[Any], value: int, width: int = 0) -> Tensor:
    """Return arrays as the rows of one table, int64, filled up on the right.

    Args:
        rows: arrays of numbers.
        value: fills up shorter rows.
        width: of the table (0: the longest row).
    """
    width = width or max(map(len, rows))
    table = np.full((len(rows), width), value, dtype=np.int64)
    for row, numbers in zip(table, rows, strict=True):
        row[: len(numbers)] = numbers
    return torch.from_numpy(table)


def collated(groups: Sequence[Sample], *, width: int = 0, most: int = 1) -> dict[str, Tensor]:
    """Return one batch of groups. Each document is a row, or all documents of a packed row.

    Args:
        groups: of :class:`Samples`.
        width: input tokens of a packed row.
        most: maximum number of documents of a packed row.

    Returns:
        ``input`` and ``target``, int64 of shape (rows, width), and the share of ``padding``.
        Documents that are rows add their ``length``. Packed rows add ``position`` and ``document``
        (number) of each token, and ``cuts``, int32: document starts in all rows concatenated.
        Padding is a separate document.
    """
    are_rows = groups[0].is_row
    if are_rows:
        rows = [group.documents for group in groups]
    else:
        rows = [[document] for group in groups for document in group.documents]
        width = 0
    inputs = [np.concatenate([token_ids(document[:-1]) for document in row]) for row in rows]
    targets = [np.concatenate([document[1:] for document in row]) for row in rows]
    targets = [np.where(target < 0, IGNORE, target) for target in targets]
    batch = {"input": filled(inputs, 0, width), "target": filled(targets, IGNORE, width)}
    lengths = np.array([len(row) for row in inputs])
    batch["padding"] = torch.tensor(1 - int(lengths.sum()) / batch["input"].numel())
    if not are_rows:
        batch["length"] = torch.from_numpy(lengths)
        return batch

    # Number the documents; the padding of a row is one, too.
    sizes = list[int]()
    for row, length in zip(rows, lengths.tolist(), strict=True):
        sizes += [len(document) - 1 for document in row]
        if length < width:
            sizes.append(width - length)
    cuts = np.cumsum(sizes) - sizes
    document = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    position = np.arange(len(document)) - cuts[document]
    batch["position"] = torch.from_numpy(position).view_as(batch["input"])
    batch["document"] = torch.from_numpy(document).view_as(batch["input"])

    # Fill up with the total length, so that ``cuts`` of all batches have the same shape.
    missing = len(rows) * (most + 1) + 1 - len(cuts)
    cuts = np.pad(cuts, (0, missing), constant_values=len(document))
    batch["cuts"] = torch.from_numpy(cuts.astype(np.int32))
    return batch


def records_of_targets(groups: Sequence[Sample]) -> NDArray[Any]:
    """Return the records of all targets of a batch, in order.

    Args:
        groups: each document has a record for each target, or for each token with a next one.
    """
    records = []
    for group in groups:
        for document, of_document in zip(group.documents, group.records, strict=True):
            is_target = document[1:] >= 0
            if len(of_document) == len(is_target):
                of_document = of_document[is_target]
            records.append(of_document)
    return np.concatenate(records)
