"""Text regression: a number for each text or pair of texts, by a transformers encoder from scratch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.data.rows.rows import Row
from oneloop.data.rows.sources import Source, named_sources, notes_of, opened, sets_of, whole
from oneloop.tasks.base import Task
from oneloop.tasks.columns import check_numbers, check_texts
from oneloop.tasks.readers import Reader, reader
from oneloop.tasks.text_classification import texts_of


class TextRegression(Task):
    """Texts, or pairs of texts, to a number; the loss is the squared error.

    Args:
        data: a file or folder of parquet, json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION]; or several,
            [{data: PATH, weight: 0.7}, …].
        text: column of the text.
        second: column of a second text, where pairs are judged.
        label: column of the number.
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
        dropout: of embeddings, attention and residuals (of bytes).
    """

    sample_weight = 1.0

    def __init__(
        self,
        data: str | list[dict[str, Any]],
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
        dropout: float = 0.0,
    ) -> None:
        shape = {"layers": layers, "heads": heads, "width": width, "length": length, "dropout": dropout}
        weights = {} if model == "bytes" else {"pretrained": pretrained, "trust_remote_code": trust_remote_code}
        self.reader = reader(model, shape, **weights)
        self.columns, self.window = {"text": text, "second": second, "label": label}, window
        sources = [opened(one, held_out=held_out, window=window) for one in named_sources(data, self.columns)]
        check_texts(sources, "text")
        check_texts(sources, "second")
        check_numbers(sources, "label")
        self.notes = self._of_data = notes_of(sources)
        self._sets = sets_of(sources, lambda source: _sample(source, self.reader))

    def model(self) -> nn.Module:
        model = self.reader.model(["number"])
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
        check_numbers([source], "label")
        return sets_of([source], lambda one: _sample(one, self.reader))["all"]

    def collate(self, samples: list[tuple[Any, float]]) -> dict[str, Tensor]:
        texts, numbers = zip(*samples, strict=True)
        return {**self.reader.collate(texts), "number": torch.tensor(numbers, dtype=torch.float32)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["number"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        said = self.reader.logits(model, batch)[:, 0]
        each = (said - batch["number"]).square()
        return each.sum(), {"said": said.detach(), "loss": each.detach()}

    def metrics(self) -> Any:
        from torchmetrics import MeanAbsoluteError, MetricCollection, PearsonCorrCoef, SpearmanCorrCoef

        return MetricCollection(
            {"spearman": SpearmanCorrCoef(), "pearson": PearsonCorrCoef(), "mean_absolute_error": MeanAbsoluteError()},
            compute_groups=False,
        )

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["said"].float(), batch["number"].float())

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> dict[str, list[Any]]:
        return {"prediction": outputs["said"].float().tolist()}

    def save(self, model: nn.Module, folder: Path) -> None:
        self.reader.save(model, folder)

    def show(self, sample: tuple[Any, float], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, number = sample
        return {
            "text": self.reader.decode(text),
            "target": f"{number:.4g}",
            "prediction": f"{float(outputs['said']):.4g}",
        }


def _sample(source: Source, reads: Reader) -> Callable[[Row], tuple[Any, float]]:
    return lambda row: (reads.encode(*texts_of(source, row)), float(row.get(source.columns["label"], 0)))
