"""Samples of a sequence-to-sequence model: pairs of source and target tokens, cut and padded.

One array holds both: the source tokens are stored as their bitwise complements, before the target
tokens.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from oneloop.data.order import Ordered, StoredOrder
from oneloop.tasks.language.kept_texts import keep_text
from oneloop.tasks.language.messages_as_json import brief, is_missing
from oneloop.tasks.language.packing import Bucketed
from oneloop.tasks.language.sequences import IGNORE, ranges
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.rows.rows import Row
from oneloop.tasks.text_notes import cut_notes, remark_unknown

Overlong = Literal["cut", "drop"]
Pair = tuple[NDArray[np.int32], NDArray[np.int32], str]
"""tokens of source and target, and the text of the target if its tokens do not give it back"""


def texts_in(rows: Any, columns: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts of rows, on which a tokenizer is trained.

    Args:
        rows: a sequence of rows.
        columns: names of the columns ``source`` and ``target``.
    """
    for index in range(len(rows)):
        row = rows[index]
        for column in columns.values():
            if isinstance(row[column], str):
                yield row[column]


def encoded_pair(
    row: Row, columns: Mapping[str, str], tokenizer: Any, prefix: str, *, labelled: bool = True
) -> NDArray[np.int32]:
    """Return the tokens of a row: complements of those of the source, then those of the target.

    Args:
        row: values by column.
        columns: names of the columns ``source`` and ``target`` ("": no such column).
        tokenizer: a tokenizer of transformers.
        prefix: text before each source.
        labelled: whether the row needs a target.

    Raises:
        ValueError: source or target are empty, or not a text.
    """
    source = _text(row, columns["source"], "source")
    inputs = tokenizer(prefix + source, verbose=False)["input_ids"]
    if not inputs:
        raise ValueError("the source has no tokens; fill it, or remove the row")
    labels = list[int]()
    if columns["target"] and (labelled or not is_missing(row[columns["target"]])):
        target = _text(row, columns["target"], "target", end=tokenizer.eos_token)
        labels = tokenizer(text_target=target, verbose=False)["input_ids"]
        # Some tokenizers end a text themselves.
        if labels[-1:] != [tokenizer.eos_token_id]:
            labels = [*labels, tokenizer.eos_token_id]
        keep_text(labels, target, tokenizer)
    remark_unknown([*inputs, *labels], tokenizer)
    return np.array([*(~token for token in inputs), *labels], dtype=np.int32)


def _text(row: Row, column: str, key: str, *, end: str = "") -> str:
    """Return a text that is not empty, without ``end`` at its end. Raise ValueError."""
    value = row[column]
    if not isinstance(value, str):
        raise ValueError(f"the {key} is {brief(value)}; task.{key} must name texts")
    # Blanks may follow.
    while end and value.rstrip().endswith(end):
        value = value.rstrip().removesuffix(end)
    if not value.strip():
        raise ValueError(f"the {key} is empty; fill it, or remove the row")
    return value


class SourceTarget:
    """Pairs of source and target tokens; in training those of a step have similar lengths.

    Args:
        texts: from :func:`encoded_pair`.
        lengths: most tokens of a source and of a target.
        overlong: cut longer ones (an end token stays), or drop the pair.
        ends: tokens that end a text.
        content: a key of the texts' content (None: unknown).

    Raises:
        ValueError: no pair is left.
    """

    def __init__(
        self,
        texts: Ragged,
        lengths: tuple[int, int],
        overlong: Overlong,
        *,
        ends: Collection[int],
        content: dict[str, Any] | None,
    ) -> None:
        self.content = content
        self._ends = ends
        self._values = texts.values
        self._texts = texts.texts
        self._limits = lengths

        # Find where each source and each target ends.
        starts, stops = ranges(texts)
        middles = starts + np.add.reduceat(texts.values < 0, starts, dtype=np.int64)
        is_cut = stops - middles > lengths[1]
        too_long = (middles - starts > lengths[0]) | is_cut
        what = f"pairs are longer than {lengths[0]:,} source or {lengths[1]:,} target tokens"
        count = int(too_long.sum())
        lines = cut_notes(count, len(stops), what, overlong, lost=int(is_cut.sum()))
        self.notes = [*texts.notes, *lines]
        keep = np.ones(len(stops), dtype=bool)
        if overlong == "drop":
            keep = ~too_long
        if not keep.any():
            raise ValueError(
                f"all {len(stops):,} pairs are longer than {lengths[0]:,} source or "
                f"{lengths[1]:,} target tokens; raise task.length or task.target_length"
            )
        self._starts = starts[keep]
        self._middles = middles[keep]
        self._stops = stops[keep]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(index)
        middle = self._middles[index]
        source = ~np.asarray(self._values[self._starts[index] : middle])
        target = np.asarray(self._values[middle : self._stops[index]])
        text = self._texts.get(self._starts[index], "")
        return self._cut(source, self._limits[0]), self._cut(target, self._limits[1]), text

    def _cut(self, tokens: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
        """Return at most ``limit`` tokens; one that ends the text stays."""
        if len(tokens) <= limit:
            return tokens
        if int(tokens[-1]) not in self._ends:
            return tokens[:limit]
        return np.append(tokens[: limit - 1], tokens[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each pair, source and target."""
        source = np.minimum(self._middles - self._starts, self._limits[0])
        target = np.minimum(self._stops - self._middles, self._limits[1])
        return np.asarray(source + target)

    def order(self, *, seed: int, batch: int, shuffle: bool = True) -> Ordered:
        """Return an order by length within a few steps; it depends on seed, epoch and batch."""
        if not shuffle:
            return StoredOrder(len(self))
        return Bucketed(self.lengths, seed=seed, batch=batch)

    def fingerprint(self) -> dict[str, Any] | None:
        """Return a key of the texts' content; None if it is unknown."""
        return self.content and {"samples": len(self), **self.content}

    @property
    def cut_references(self) -> str:
        """Why generated texts cannot be compared: some targets are cut; else empty."""
        limit = self._limits[1]
        count = int((self._stops - self._middles > limit).sum())
        if not count:
            return ""
        return (
            f"{count:,} of {len(self):,} targets are cut at {limit:,} tokens; raise "
            "task.target_length, or set task.overlong drop"
        )

    @property
    def warning(self) -> str:
        """Lines for the user about texts that are too long or unknown; else empty."""
        return "; ".join(self.notes)

    def about(self) -> str:
        """Return a log line about the lengths."""
        lengths = self.lengths
        return (
            f"{len(self):,} pairs of {lengths.mean():.0f} tokens on average, {lengths.max():,} at "
            "most, padded"
        )


def collated_pairs(pairs: Sequence[Pair], *, padding: int) -> dict[str, Any]:
    """Return one batch, padded to its longest source and target.

    Args:
        pairs: source and target tokens, and texts.
        padding: token of the padding of sources.

    Returns:
        ``input`` and ``mask`` (1: not padding), (samples, source tokens); ``target``, (samples,
        target tokens), in which padding is ignored; the share of ``padding``; and ``text``, of each
        target that its tokens do not give back, or "".
    """
    width = max(len(source) for source, _, _ in pairs)
    target_width = max(1, *(len(target) for _, target, _ in pairs))
    inputs = np.full((len(pairs), width), padding, dtype=np.int64)
    mask = np.zeros_like(inputs)
    targets = np.full((len(pairs), target_width), IGNORE, dtype=np.int64)
    for row, (source, target, _) in enumerate(pairs):
        inputs[row, : len(source)] = source
        mask[row, : len(source)] = 1
        targets[row, : len(target)] = target
    real = mask.sum() + (targets != IGNORE).sum()
    return {
        "input": torch.from_numpy(inputs),
        "mask": torch.from_numpy(mask),
        "target": torch.from_numpy(targets),
        "padding": torch.tensor(1 - real / (inputs.size + targets.size)),
        "text": [text for _, _, text in pairs],
    }
