"""Base class of the tasks on rows of text: data, tokenization and model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.task_protocol.protocol import RECORDED
from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.columns import check_column
from oneloop.tasks.labels import classes_of, numbers_of
from oneloop.tasks.language.tokens import tokenizer_key
from oneloop.tasks.rows.cached_arrays import ragged
from oneloop.tasks.rows.open_data import (
    Data,
    Source,
    SplitBy,
    SplitSets,
    Unreadable,
    named_sources,
    notes_of,
    opened,
    sets_of,
    skipped_rows,
    whole,
)
from oneloop.tasks.rows.remote_checks import is_remote
from oneloop.tasks.rows.rows import FINDINGS, Row
from oneloop.tasks.text_encoders import BYTES, TextReader
from oneloop.tasks.text_notes import cut_notes

_NEEDS = {  # see ``needs`` of :class:`oneloop.task_protocol.protocol.Task`
    "layers": "model=bytes",
    "heads": "model=bytes",
    "width": "model=bytes",
    "dropout": "model=bytes",
    "pretrained": "model!=bytes",
    "trust_remote_code": "model!=bytes",
}

_ANY_LENGTH = 1 << 30


class TextRows(SplitSets):
    """Base class: one target per row, which is a text or a pair of texts.

    Args:
        data: value of ``task.data``; None: the subclass sets ``_sets``.
        columns: column names by key of the task.
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        window: megabytes of parquet rows in memory per process.
        unreadable: stop at a row of a file that cannot be read (broken JSON or CSV, text that is
            not UTF-8), or skip such rows and list them in environment.json.
        stream: read hf:NAME in place, by ranges of its Parquet files, instead of a download.
    """

    sample_weight: float | None = 1.0
    needs: dict[str, str] = _NEEDS
    target = "label"  # task key of the target column
    words = False  # whether each word has a target, instead of the whole text
    predicts_classes = True  # whether the target is a class
    new_model = BYTES  # name of the model from scratch
    default_length = 256  # of ``length``; a model with fewer positions gets shorter texts
    classes: Sequence[str] = ()  # names of the model's outputs

    def __init__(
        self,
        data: Data | None,
        columns: dict[str, str],
        held_out: float = 0.05,
        window: int = 256,
        unreadable: Unreadable = "stop",
        split_by: SplitBy = "rows",
        stream: bool = False,
        **reader: Any,
    ) -> None:
        # Make the reader, which converts texts to the inputs of its model.
        self.reader = TextReader(new=self.new_model, default_length=self.default_length, **reader)
        self.columns = columns
        self.window = window

        # A run that is loaded has recorded its classes, and needs no data.
        recorded = RECORDED.get()
        if recorded:
            self.classes = recorded["classes"]
        sources = list[Source]()
        if data is not None and not recorded:
            sources = named_sources(
                data, columns, unreadable=unreadable, split_by=split_by, stream=stream
            )
        # In a mixture, another source may train a class.
        one = isinstance(data, str) and self.predicts_classes
        for source in sources:
            opened(source, held_out=held_out, window=window, label=self.target if one else "")
        self._sets = self._samples(sources) if sources else {}
        self.recorded = {"classes": self.classes}
        lines = [line for source in sources for line in self._text_notes(source)]
        self.notes = self._data_notes = [*notes_of(sources), *self.reader.about, *lines]
        self.skipped_rows = skipped_rows(sources)

    def _samples(self, sources: Sequence[Source], *, labelled: bool = True) -> dict[str, Any]:
        self._check(sources)
        numbers = self._numbers(sources) if labelled else {}
        return sets_of(sources, lambda source: self._sample(source, numbers.get(source.name, int)))

    def _check(self, sources: Sequence[Source]) -> None:
        check_column(sources, "text")
        check_column(sources, "second")

    def _text_notes(self, source: Source) -> Iterator[str]:
        """Yield log lines about texts that are cut, and about unknown tokens."""
        tokenizer = self.reader.tokenizer
        unit = "bytes" if self.reader.name == BYTES else "tokens"
        reader = deepcopy(self.reader)  # a tokenizer keeps its limit
        reader.length = _ANY_LENGTH
        names = [name for key, name in source.columns.items() if name and key != self.target]
        # The two texts of a pair are encoded together.
        texts = [names] if "second" in self.columns else [[name] for name in names]
        for split, rows in source.parts.items():
            # Remote rows are not all read before a run. ``oneloop check`` keeps missing values.
            if is_remote(rows) or FINDINGS.get() is not None:
                continue
            made = ragged(
                rows,
                partial(_sizes, reader, texts),
                made_by=["sizes", tokenizer_key(tokenizer), texts],
                what="measuring the texts",
                skip=True,
                empty=True,
            )
            longer = np.maximum(made.values - self.reader.length, 0)
            size = f"{self.reader.length:,} {unit} (by {longer.sum():,} in all)"
            what = f"texts are longer than {size}"
            lines = cut_notes(int((longer > 0).sum()), len(longer), what, "cut")
            for line in [*lines, *made.notes]:
                yield line if split == "all" else f"{split}: {line}"

    def _numbers(self, sources: Sequence[Source]) -> Mapping[str, Callable[[Any], Any]]:
        """Return functions from a target to a number, by source.

        The first call (training rows) sets the classes.
        """
        if not self.classes:
            self.classes, numbers = classes_of(sources, self.target, lists=self.words)
            return numbers
        return {
            source.name: numbers_of(source, self.target, self.classes, lists=self.words)
            for source in sources
        }

    def _sample(self, source: Source, number: Callable[[Any], Any]) -> Callable[[Row], Any]:
        return partial(self.encoded, self.reader, source.columns, number)

    @staticmethod
    def encoded(
        reader: TextReader,
        columns: Mapping[str, str],
        number: Callable[[Any], Any],
        row: Row,
    ) -> Any:
        """Return the sample of a row: its encoded texts, and the number of its label.

        Args:
            reader: encodes texts.
            columns: names of the columns, by key of the task. A row to predict has no label.
            number: of a label.
            row: the row.
        """
        second = row[columns["second"]] if columns["second"] else None
        sample = reader.encode(row[columns["text"]], second)
        return sample, number(row.get(columns["label"], 0))

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        texts, labels = zip(*samples, strict=True)
        batch = self.reader.collate(texts)
        batch["label"] = torch.tensor(labels)
        return batch

    def model(self) -> nn.Module:
        model = self.reader.model(self.classes, words=self.words)
        self.notes = [*self._data_notes, *self.reader.notes]
        return model

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        columns = dict(self.columns)
        if not labelled:
            columns[self.target] = ""
        source = whole(Source(data, columns), window=self.window)
        samples = self._samples([source], labelled=labelled)["all"]
        samples.warning = "; ".join(self._text_notes(source))
        return samples

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(next(iter(batch.values())))))

    def metrics(self) -> Any:
        return ClassCounts(len(self.classes))

    def save(self, model: nn.Module, folder: Path) -> None:
        self.reader.save(model, folder)


def _sizes(reader: Any, texts: Sequence[Sequence[str]], row: Row) -> NDArray[np.int32]:
    """Return the number of tokens or bytes of each text of a row."""
    sizes = list[int]()
    for names in texts:
        values = [row[name] for name in names]
        if isinstance(values[0], list):
            sizes.append(reader.encode_words(*values)[2])
            continue
        sizes.append(len(reader.encode(*values)["input_ids"]))
    return np.array(sizes, np.int32)
