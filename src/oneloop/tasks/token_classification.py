"""Token classification (names, parts of speech): predict a class for each word."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.columns import (
    UNTAGGED,
    check_column,
    check_together,
    columns_of,
    element_type,
    is_text,
    values_of,
)
from oneloop.tasks.rows.open_data import Data, Source
from oneloop.tasks.rows.remote_checks import is_remote
from oneloop.tasks.rows.rows import Row, drop_rows
from oneloop.tasks.text_encoders import TextReader
from oneloop.tasks.text_rows import TextRows

_UNTAGGED = -1  # class of a word whose tag is -100
_IGNORE = -100  # class of a position that is not the start of a word


class TokenClassification(TextRows):
    """A class for each word of a text, predicted at the word's first byte or token. The weight of a
    sample is its number of words.

    Args:
        data: a file or folder of parquet, json lines or arrow; hf:NAME[:CONFIG][@REVISION];
            parquet at s3://, gs:// (not tested), hf://datasets/ or https://; or several,
            [{data: PATH, weight: 0.7}, …].
        tokens: column of the words (a list of texts).
        tags: column of their classes (a list of the same length; a word of -100 is not trained).
        length: maximum bytes or tokens of a text; the rest is cut and does not count. The metric
            words_cut is the number of words after the cut.
    """

    sample_weight = None
    unit = "tokens"
    target = "tags"
    words = True
    default_length = 512

    def __init__(
        self,
        data: Data,
        tokens: str = "tokens",
        tags: str = "tags",
        length: int = 512,
        **reading: Any,
    ) -> None:
        super().__init__(data, {"tokens": tokens, "tags": tags}, length=length, **reading)

    def _check(self, sources: Sequence[Source]) -> None:
        check_column(sources, "tokens", _are_words, "lists of texts")
        for source, split, rows, column in columns_of(sources, "tags"):
            if not is_remote(rows):
                source.parts[split] = _with_tags(source, split, rows, column)
        if sources[0].columns["tags"]:
            check_together(sources, ["tokens", "tags"], _unequal)

    @staticmethod
    def encoded(
        reader: TextReader,
        columns: Mapping[str, str],
        number: Callable[[Any], Any],
        row: Row,
    ) -> Any:
        """Return the sample of a row: its encoded words, a target for each byte or token, and its
        number of words after the cut.
        """
        words = row[columns["tokens"]]
        classes = row.get(columns["tags"], [0] * len(words))

        # Each word is predicted where it starts. Words that are cut have no start.
        sample, starts, length = reader.encode_words(words)
        kept = classes[: len(starts)]
        numbers = [_UNTAGGED if one in UNTAGGED else number(one) for one in kept]
        target = torch.full((length,), _IGNORE)
        target[starts] = torch.tensor(numbers, dtype=torch.int64)
        return sample, target, len(words) - len(starts)

    def collate(self, samples: list[tuple[Any, Tensor, int]]) -> dict[str, Tensor]:
        texts, targets, words_cut = zip(*samples, strict=True)
        batch = self.reader.collate(texts)
        batch["target"] = nn.utils.rnn.pad_sequence(
            list(targets), batch_first=True, padding_value=_IGNORE
        )
        batch["words_cut"] = torch.tensor(words_cut)
        return batch

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["target"] >= 0).sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.reader.logits(model, batch)
        target = batch["target"].clamp(min=_UNTAGGED)
        each = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction="none", ignore_index=_UNTAGGED
        )
        return each.sum(), {"logits": logits.detach(), "loss": each.detach().view_as(target)}

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes), number="words_cut")

    def update(
        self, metrics: ClassCounts, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        metrics.update(outputs["logits"].flatten(0, 1), batch["target"].flatten())
        metrics.number += batch["words_cut"].sum()

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        """Return the predicted classes of the words of each text, without words that are cut."""
        predicted = outputs["logits"].argmax(-1)
        prediction = []
        for row, target in zip(predicted, batch["target"], strict=True):
            prediction.append(self._names(row[target != _IGNORE]))
        return {"prediction": prediction}

    def _names(self, numbers: Tensor) -> list[str]:
        return [self.classes[number] for number in numbers.tolist()]

    def show(self, sample: tuple[Any, Tensor, int], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, target, _ = sample
        starts = (target >= 0).nonzero().flatten().tolist()
        predicted = self._names(outputs["logits"][starts].argmax(-1))
        targets = self._names(target[starts])
        losses = outputs["loss"][starts].tolist()

        # A word ends where the next one starts.
        stops = [*starts[1:], len(target)][: len(starts)]
        tokens = []
        for start, stop, tag, loss in zip(starts, stops, predicted, losses, strict=True):
            tokens.append((f"{self.reader.decode(text, start, stop)}[{tag}]", loss))
        return {
            "tokens": tokens,
            "target": " ".join(targets),
            "prediction": " ".join(predicted),
            "right": predicted == targets,
        }


def _are_words(kind: Any) -> bool:
    return is_text(element_type(kind))


def _unequal(words: Sequence[str], tags: Sequence[Any]) -> str:
    """Return why the tags of a row are not those of its words; empty if they are."""
    if len(words) == len(tags):
        return ""
    return f"{len(words)} words and {len(tags)} tags; each word needs one"


def _with_tags(source: Source, split: str, rows: Any, column: str) -> Any:
    """Return rows without those that have only tags of -100: their loss would sum nothing.

    Raise ValueError if no row is left.
    """
    out = []
    for index, row in enumerate(values_of(rows, column)):
        if isinstance(row, list) and row and all(tag in UNTAGGED for tag in row):
            out.append(index)
    if len(out) == len(rows):
        raise ValueError(
            f"{rows.where(0)}: no row of the {split} split has a tag other than -100 in "
            f"{column!r}; give the words tags, or set a larger task.held_out if it is drawn"
        )
    if out:
        source.notes.append(
            f"{len(out):,} of {len(rows):,} rows have no tag other than -100 and are left out; the "
            f"first: {rows.where(out[0])}"
        )
    return drop_rows(rows, np.array(out))
