"""Rows of a language task as arrays of tokens, for training and for prediction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oneloop.tasks.language.sequences import Samples
from oneloop.tasks.language.tokens import tokenizer_key
from oneloop.tasks.packaged_rows import SPLITS, PackagedRows
from oneloop.tasks.rows.cache import key_of
from oneloop.tasks.rows.cached_arrays import Ragged, ragged
from oneloop.tasks.rows.open_data import Data as Data
from oneloop.tasks.rows.open_data import (
    Source,
    SplitBy,
    Unreadable,
    first_columns,
    local_only,
    named_sources,
    note_skipped,
    opened,
    whole,
)

Choices = Sequence[Mapping[str, str]]
"""columns that a source may have by key of the task ("": no such column), the first choice first"""
Encoder = Callable[[Source, Any], tuple[partial[Any], Any]]
"""of a source and the rows of a split: makes tokens of a row with a ``tokenizer`` and settings that
are JSON values; and what else the tokens depend on, such as the template of its ``chat``"""
_CACHE_VERSION = 4  # increase it if the tokens of a row change
MakeSamples = Callable[[str, Ragged, Any], Samples]
"""of the name of a split, the tokens of its rows, and a key of their content"""


@dataclass(frozen=True, kw_only=True)
class RowSettings:
    """How rows are read and divided.

    Args:
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        window: megabytes of parquet rows in memory per process.
        unreadable: stop at a row that cannot be read, or skip such rows and list them in
            environment.json.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
    """

    held_out: float = 0.05
    window: int = 256
    unreadable: Unreadable = "stop"
    split_by: SplitBy = "rows"


def open_sources(
    data: Data,
    settings: RowSettings,
    choices: Choices,
    packaged: Mapping[str, str],
    *,
    optional: Sequence[str] = (),
) -> list[Source]:
    """Open the data sets that ``task.data`` names.

    Args:
        data: value of ``task.data``.
        settings: how rows are read and divided.
        choices: columns of a source.
        packaged: name of the packaged rows for each value of ``task.data`` that means some.
        optional: keys of columns without which a test split is not left out.

    Raises:
        ValueError: a data set cannot be opened.
    """
    if isinstance(data, str) and data in packaged:
        parts = {split: PackagedRows(packaged[data], split) for split in SPLITS}
        names = {name: name for name in parts["train"][0]}
        return [Source(data, dict.fromkeys(choices[0], "") | names, parts=parts)]
    open_ = partial(opened, held_out=settings.held_out, window=settings.window)
    sources = []
    for source in named_sources(
        data,
        choices[0],
        unreadable=settings.unreadable,
        split_by=settings.split_by,
        remote=False,
    ):
        source.optional = tuple(optional)
        # A source of a mixture may name its columns itself.
        names = {key: name for key, name in source.columns.items() if name != choices[0][key]}
        named = []
        for columns in choices:
            named.append({key: name and names.get(key, name) for key, name in columns.items()})
        sources.append(first_columns(source, named, open_))
    return sources


def tokens_of(source: Source, split: str, encoder: Encoder) -> tuple[Ragged, Any]:
    """Return the tokens of the rows of one split, and a key of their content."""
    rows = source.parts[split]
    encode, more = encoder(source, rows)
    settings = {**encode.keywords, "chat": more}
    settings["tokenizer"] = tokenizer_key(settings["tokenizer"])
    key = [_CACHE_VERSION, encode.func.__name__, settings]
    content = {**rows.fingerprint(), "made by": key_of(key)}

    # Do not skip rows of ``oneloop predict``: each row needs its answer.
    skip = source.skipped is not None and split != "all"
    texts = ragged(rows, encode, made_by=key, what=f"tokenizing {source.where}", skip=skip)
    left_out = note_skipped(source, rows, texts.skipped)
    if left_out:
        content["skipped"] = key_of(left_out)
    return texts, content


def samples_of_sources(
    sources: Sequence[Source], encoder: Encoder, make: MakeSamples
) -> list[dict[str, Samples]]:
    """Return the samples of each source by split. Raise ValueError if a split has none."""
    samples = []
    for source in sources:
        splits = {}
        for split in source.parts:
            texts, content = tokens_of(source, split, encoder)
            try:
                splits[split] = make(split, texts, content)
            except ValueError as error:
                raise ValueError(f"{split}: {error}") from error
        samples.append(splits)
    return samples


def tokens_of_new_rows(
    data: str, choices: Choices, window: int, encoder: Encoder
) -> tuple[Ragged, Any]:
    """Return the tokens of all rows of other data, and a key of their content."""
    local_only(data)
    source = first_columns(Source(data, choices[0]), choices, partial(whole, window=window))
    return tokens_of(source, "all", encoder)
