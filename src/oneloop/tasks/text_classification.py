"""Text classification: a transformers encoder from scratch; packaged data: from which package is this snippet?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.data.rows.rows import Row
from oneloop.data.rows.sources import Source, named_sources, notes_of, opened, sets_of, whole
from oneloop.tasks.base import Task
from oneloop.tasks.columns import check_texts
from oneloop.tasks.corpora import held_out, stdlib
from oneloop.tasks.labels import classes_of, likeliest, numbers_of
from oneloop.tasks.metrics import ClassCounts
from oneloop.tasks.readers import Reader, reader


class TextClassification(Task):
    """Texts, or pairs of texts, into classes.

    Args:
        data: stdlib (snippets of Python's standard library; the class is the package, held out by file); a file or
            folder of parquet, json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; or several,
            [{data: PATH, weight: 0.7}, …].
        text: column of the text.
        second: column of a second text, where pairs are judged.
        label: column of the class.
        held_out: share of the rows for validation, and as much for test, where the data has no such parts.
        window: megabytes of parquet rows that a process may hold; samples are shuffled among so many.
        model: bytes (an encoder from scratch that reads byte by byte), a folder that transformers saved, or
            hf:ID[@REVISION], whose last layer is new where it is of other classes.
        pretrained: with the weights of that folder or hf:; false: from scratch, in its shape.
        trust_remote_code: run Python that lies beside those weights (only of people you trust).
        layers: transformer blocks (of bytes).
        heads: attention heads (of bytes).
        width: of the residual stream (of bytes).
        length: bytes, or tokens, of the longest text; longer ones are cut.
        packages: the largest packages of the standard library to tell apart.
        lines: lines of a snippet.
        dropout: of embeddings, attention and residuals (of bytes).
    """

    sample_weight = 1.0

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "stdlib",
        text: str = "text",
        second: str = "",
        label: str = "label",
        held_out: float = 0.05,
        window: int = 256,
        model: str = "bytes",
        pretrained: bool = True,
        trust_remote_code: bool = False,
        layers: int = 2,
        heads: int = 4,
        width: int = 128,
        length: int = 256,
        packages: int = 8,
        lines: int = 12,
        dropout: float = 0.0,
    ) -> None:
        shape = {"layers": layers, "heads": heads, "width": width, "length": length, "dropout": dropout}
        weights = {} if model == "bytes" else {"pretrained": pretrained, "trust_remote_code": trust_remote_code}
        self.reader = reader(model, shape, **weights)
        self._sets: dict[str, Any]
        self._of_data: list[str] = []
        self.columns, self.window = {"text": text, "second": second, "label": label}, window
        if data == "stdlib":
            parts = _snippets(packages, lines)
            self.classes = sorted({label for _, label in parts["train"]})
            number = {label: index for index, label in enumerate(self.classes)}
            self._sets = {
                name: [(self.reader.encode(text), number[label]) for text, label in part]
                for name, part in parts.items()
            }
            return
        sources = [opened(one, held_out=held_out, window=window) for one in named_sources(data, self.columns)]
        check_texts(sources, "text")
        check_texts(sources, "second")
        self.classes, numbers = classes_of(sources, "label")
        self.notes = self._of_data = notes_of(sources)
        self._sets = sets_of(sources, lambda source: _sample(source, self.reader, numbers[source.name]))

    def model(self) -> nn.Module:
        model = self.reader.model(self.classes)
        self.notes = [*self._of_data, *self.reader.notes]
        return model

    def train_set(self) -> Any:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: part for name, part in self._sets.items() if name != "train"}

    def samples_of(self, data: str, *, labelled: bool) -> Any:
        source = whole(Source(data, self.columns | ({} if labelled else {"label": ""})), window=self.window)
        check_texts([source], "text")
        check_texts([source], "second")
        number = numbers_of(source, "label", self.classes) if labelled else int
        return sets_of([source], lambda one: _sample(one, self.reader, number))["all"]

    def collate(self, samples: list[tuple[Any, int]]) -> dict[str, Tensor]:
        texts, labels = zip(*samples, strict=True)
        return {**self.reader.collate(texts), "label": torch.tensor(labels)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["label"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = self.reader.logits(model, batch)
        each = F.cross_entropy(logits, batch["label"], reduction="none")
        return each.sum(), {"logits": logits.detach(), "loss": each.detach()}

    def metrics(self) -> ClassCounts:
        return ClassCounts(len(self.classes))

    def update(self, metrics: ClassCounts, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["logits"], batch["label"])

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        return likeliest(outputs["logits"], self.classes)

    def save(self, model: nn.Module, folder: Path) -> None:
        self.reader.save(model, folder)

    def show(self, sample: tuple[Any, int], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, label = sample
        confidence, found = outputs["logits"].float().softmax(-1).max(-1)
        return {
            "text": self.reader.decode(text),
            "target": self.classes[label],
            "prediction": self.classes[int(found)],
            "right": int(found) == label,
            "confidence": float(confidence),
        }


def texts_of(source: Source, row: Row) -> tuple[str, str | None]:
    """The text of a row, and the second one of a pair."""
    second = source.columns["second"]
    return row[source.columns["text"]], row[second] if second else None


def _sample(source: Source, reads: Reader, number: Callable[[Any], int]) -> Callable[[Row], tuple[Any, int]]:
    return lambda row: (reads.encode(*texts_of(source, row)), number(row.get(source.columns["label"], 0)))


def _snippets(packages: int, lines: int) -> dict[str, list[tuple[str, str]]]:
    """Snippets of the largest packages, divided by file, so that no file is in two parts."""
    documents = [one for one in stdlib() if "/" in one.name]
    size = Counter[str]()
    for one in documents:
        size[one.name.split("/")[0]] += len(one.text)
    largest = {name for name, _ in size.most_common(packages)}
    parts: dict[str, list[tuple[str, str]]] = {}
    for part, chosen in held_out([one for one in documents if one.name.split("/")[0] in largest], percent=10).items():
        parts[part] = []
        for one in chosen:
            code = [line for line in one.text.splitlines() if line.strip()]
            for start in range(0, len(code), lines):
                parts[part].append(("\n".join(code[start : start + lines]), one.name.split("/")[0]))
    return parts
