"""Base class of the tasks on raw texts: causal and masked language modelling."""

from collections.abc import Callable
from functools import partial
from itertools import chain, starmap
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.columns import check_column, values_of
from oneloop.tasks.language.language_model import LanguageModel, ModelSettings
from oneloop.tasks.language.tokens import learn_bpe, tokenizer_key
from oneloop.tasks.rows.cache import rows_content
from oneloop.tasks.rows.cached_arrays import Ragged, ragged
from oneloop.tasks.rows.find_files import KINDS_OF_TEXTS
from oneloop.tasks.rows.open_data import (
    Data,
    Source,
    SplitBy,
    Unreadable,
    local_only,
    named_sources,
    opened,
    whole,
)
from oneloop.tasks.rows.rows import Row

Encode = Callable[[str], NDArray[np.int32]]
Pack = Literal["concat", "packed", "padded"]
_CHECK = partial(check_column, key="column")


class RawTexts(LanguageModel):
    """Base class: samples are cut from raw texts.

    A subclass chooses its tokenizer, and calls :meth:`_tokenize`.

    Args:
        data: value of ``task.data``.
        block: tokens per sample.
        pack: how samples are made of texts.
        column: column of the text.
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        window: megabytes of parquet rows in memory per process.
        unreadable: stop at a row of a file that cannot be read (broken JSON or CSV, text that is
            not UTF-8), or skip such rows and list them in environment.json.
    """

    length_key = "block"
    default_length = 128
    ends_texts = True  # whether the tokenizer adds a token at the end of each text

    def __init__(
        self,
        data: Data,
        *,
        block: int,
        pack: Pack,
        column: str = "text",
        held_out: float = 0.05,
        window: int = 256,
        unreadable: Unreadable = "stop",
        split_by: SplitBy = "rows",
        **model: Any,
    ) -> None:
        settings = ModelSettings(length=block, **model)
        super().__init__(settings, packed=pack == "packed")
        self.pack = pack
        self.block = self.shape.length
        self.column = column
        self.window = window
        self._sources = named_sources(
            data, {"column": column}, unreadable=unreadable, split_by=split_by, remote=False
        )
        for source in self._sources:
            opened(source, held_out=held_out, window=window, kinds=KINDS_OF_TEXTS, check=_CHECK)

    def _learn_bpe(self, vocab: int, *special: str) -> str:
        """Train a BPE on the training texts; it is cached by their content.

        Args:
            vocab: vocabulary size.
            special: special tokens, which get the first ids.
        """
        trained = [(source.parts["train"], source.columns["column"]) for source in self._sources]
        content = [[rows_content(rows), column] for rows, column in trained]
        texts = chain.from_iterable(starmap(values_of, trained))
        return learn_bpe(texts, vocab, special, cache_key=content)

    def _tokenize(self, encode: Encode) -> None:
        """Make the samples of each source and split; ``encode`` returns the tokens of a text."""
        self._encode = encode
        self._tokenizer_key = tokenizer_key(self.tokenizer)
        samples = []
        for source in self._sources:
            column = source.columns["column"]
            splits = {}
            for name, rows in source.parts.items():
                splits[name] = self._samples(*self._tokens(rows, column, name), name)
            samples.append(splits)
        self._use(self._sources, samples)

    def _tokens(self, rows: Any, column: str, name: str) -> tuple[Ragged, dict[str, Any]]:
        """Return the tokens of the texts of a split, and a key of the texts' content."""
        make = partial(_encoded, self._encode, column, self.ends_texts)
        made_by = [self._tokenizer_key, self.ends_texts, column]
        tokens = ragged(rows, make, made_by=made_by, what=f"tokenizing {name}")
        return tokens, {**rows.fingerprint(), "text": column}

    def _samples(self, tokens: Ragged, content: dict[str, Any], name: str) -> Any:
        """Return the samples of one split; only training samples are packed."""
        raise NotImplementedError

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        local_only(data)
        source = whole(
            Source(data, {"column": self.column}), window=self.window, kinds=KINDS_OF_TEXTS
        )
        _CHECK([source])
        return self._samples(*self._tokens(source.parts["all"], self.column, "texts"), "texts")


def _encoded(encode: Encode, column: str, ended: bool, row: Row) -> NDArray[np.int32]:
    """Return the tokens of a row's text.

    Args:
        encode: returns the tokens of a text.
        column: column of the text.
        ended: whether ``encode`` adds a token at the end of the text.
        row: the row; its text may continue elsewhere.
    """
    tokens = encode(row[column])
    return tokens if not ended or row.get("ends", True) else tokens[:-1]
