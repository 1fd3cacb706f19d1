"""Rows of a sequence-to-sequence model as pairs of source and target tokens, and their batches."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from oneloop.tasks.language.kept_texts import keep_text
from oneloop.tasks.language.messages_as_json import brief, is_missing
from oneloop.tasks.language.sequences import IGNORE, Sample, filled
from oneloop.tasks.rows.cached_arrays import remark
from oneloop.tasks.rows.rows import Row
from oneloop.tasks.text_notes import remark_unknown

Overlong = Literal["cut", "drop"]


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


def limit_of(lengths: tuple[int, int]) -> str:
    """Return the most tokens of a source and of a target, for messages."""
    return (
        f"task.length ({lengths[0]:,} source tokens) or task.target_length ({lengths[1]:,} target "
        "tokens)"
    )


def encoded_source(
    row: Row,
    columns: Mapping[str, str],
    tokenizer: Any,
    *,
    prefix: str,
    lengths: tuple[int, int],
    overlong: Overlong = "cut",
    labelled: bool = True,
) -> NDArray[np.int32]:
    """Return a row as a pair of documents; empty if it is dropped.

    The pair is as of :func:`oneloop.tasks.language.sequences.paired`; its number is 1 if the target
    is cut.

    Args:
        row: values by column.
        columns: names of the columns ``source`` and ``target`` ("": no such column).
        tokenizer: a tokenizer of transformers.
        prefix: text before each source.
        lengths: most tokens of a source and of a target.
        overlong: cut longer ones (an end token stays), or drop the pair.
        labelled: whether the row needs a target.

    Raises:
        ValueError: source or target are empty, or not a text.
    """
    source = _text(row, columns["source"], "source")
    inputs = tokenizer(prefix + source, verbose=False)["input_ids"]
    if not inputs:
        raise ValueError("the source has no tokens; fill it, or remove the row")
    labels = list[int]()
    target = ""
    if columns["target"] and (labelled or not is_missing(row[columns["target"]])):
        target = _text(row, columns["target"], "target", end=tokenizer.eos_token)
        labels = tokenizer(text_target=target, verbose=False)["input_ids"]
        # Some tokenizers end a text themselves.
        if labels[-1:] != [tokenizer.eos_token_id]:
            labels = [*labels, tokenizer.eos_token_id]

    # Drop a pair that is too long, or cut it.
    is_cut = len(labels) > lengths[1]
    if is_cut or len(inputs) > lengths[0]:
        example = f"{len(inputs):,} and {len(labels):,} tokens"
        remark(f"are longer than {limit_of(lengths)}; task.overlong is {overlong}", example)
        if overlong == "drop":
            return np.zeros(0, np.int32)
    keep_text(labels, target, tokenizer)
    remark_unknown([*inputs, *labels], tokenizer)
    inputs, labels = (
        _cut(tokens, limit, tokenizer.all_special_ids)
        for tokens, limit in zip((inputs, labels), lengths, strict=True)
    )
    return np.array([len(inputs), is_cut, *inputs, *labels], dtype=np.int32)


def _cut(tokens: list[int], limit: int, ends: Sequence[int]) -> list[int]:
    """Return at most ``limit`` tokens; one that ends the text stays."""
    if len(tokens) > limit and tokens[-1] in ends:
        return [*tokens[: limit - 1], tokens[-1]]
    return tokens[:limit]


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


def collated_sources(samples: Sequence[Sample], *, padding: int) -> dict[str, Any]:
    """Return one batch, padded to its longest source and target.

    Args:
        samples: pairs of source and target tokens.
        padding: token of the padding of sources.

    Returns:
        ``input`` and ``mask`` (1: not padding), (samples, source tokens); ``target``, (samples,
        target tokens), in which padding is ignored; the share of ``padding``; and ``text``, of each
        target that its tokens do not give back, or "".
    """
    sources, targets = zip(*(sample.documents for sample in samples), strict=True)
    inputs = filled(sources, padding)
    mask = filled([np.ones_like(source) for source in sources], 0)
    target = filled(targets, IGNORE, max(1, *map(len, targets)))
    total = inputs.numel() + target.numel()
    real = int(mask.sum() + (target != IGNORE).sum())
    return {
        "input": inputs,
        "mask": mask,
        "target": target,
        "padding": torch.tensor(1 - real / total, dtype=torch.float64),
        "text": [sample.text for sample in samples],
    }
