"""Base class of the tasks on raw texts: causal and masked language modelling."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

from oneloop.tasks.language.language_model import LanguageModel, ModelSettings
from oneloop.tasks.language.texts import Texts, all_texts, texts_of
from oneloop.tasks.language.tokens import BPE, END_OF_TEXT
from oneloop.tasks.rows.cache import rows_content
from oneloop.tasks.rows.open_data import (
    Source,
    SplitBy,
    Unreadable,
    local_only,
    named_sources,
    notes_of,
    skipped_rows,
)


class RawTexts(LanguageModel):
    """Base class: samples are cut from raw texts.

    A subclass chooses its tokenizer, and calls :meth:`_tokenize`.

    Args:
        data: value of ``task.data``.
        column: column of the text.
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        window: megabytes of parquet rows in memory per process.
        unreadable: stop at a row of a file that cannot be read, or skip such rows.
        packed: whether a sample has several documents that do not attend to each other.
    """

    length_key = "block"
    default_length = 128

    def __init__(
        self,
        *,
        data: str | list[dict[str, Any]],
        column: str,
        held_out: float,
        window: int,
        unreadable: Unreadable,
        split_by: SplitBy,
        packed: bool,
        **model: Any,
    ) -> None:
        super().__init__(ModelSettings(**model), packed=packed)
        self.column = column
        self.window = window
        self._sources = named_sources(
            data, {"column": column}, unreadable=unreadable, split_by=split_by, remote=False
        )
        self._texts = [texts_of(source, share=held_out, window=window) for source in self._sources]
        self.skipped_rows = skipped_rows(self._sources)
        self._data_notes += notes_of(self._sources)

    def _train_bpe(
        self, vocab: int, special: Sequence[str] = END_OF_TEXT
    ) -> tuple[BPE, Sequence[Any] | None]:
        """Train a BPE on the training texts; return it, and a key of their content.

        Args:
            vocab: vocabulary size.
            special: special tokens, which get the first ids.
        """
        trained = [splits["train"] for splits in self._texts]
        fingerprints = [rows_content(split) for split in trained]
        content = None if None in fingerprints else fingerprints
        texts = chain.from_iterable(trained)
        bpe = BPE(texts, vocab, cache_key=content, special=special)
        return bpe, content

    def _tokenize(self) -> None:
        """Make the samples of each source and split."""
        samples = []
        for splits in self._texts:
            samples.append({name: self._samples(split, name) for name, split in splits.items()})
        self._use(self._sources, samples)

    def _samples(self, part: Texts, name: str) -> Any:
        """Return the samples of one split; only training samples are packed."""
        raise NotImplementedError

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        local_only(data)
        source = Source(data, {"column": self.column})
        return self._samples(all_texts(source, window=self.window), "texts")
