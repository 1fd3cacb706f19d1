"""Text regression: predict a number for each text or pair of texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.tasks.columns import check_column, element_type, is_text
from oneloop.tasks.rows.open_data import Data, Source
from oneloop.tasks.text_rows import TextRows


class TextRegression(TextRows):
    """Regression on texts or pairs of texts; the loss is the squared error.

    Args:
        data: a file or folder of parquet, json lines, csv or arrow; hf:NAME[:CONFIG][@REVISION];
            parquet at s3://, gs:// (not tested), hf://datasets/ or https://; or several,
            [{data: PATH, weight: 0.7}, …].
        text: column of the text.
        second: column of the second text, for pairs.
        label: column of the number.
    """

    classes = ("number",)
    predicts_classes = False

    def __init__(
        self,
        data: Data,
        text: str = "text",
        second: str = "",
        label: str = "label",
        **reading: Any,
    ) -> None:
        super().__init__(data, {"text": text, "second": second, "label": label}, **reading)

    def _check(self, sources: Sequence[Source]) -> None:
        super()._check(sources)
        check_column(sources, "label", _may_be_number, "a number", "numbers")

    def _numbers(self, sources: Sequence[Source]) -> Mapping[str, Callable[[Any], float]]:
        return {source.name: float for source in sources}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        prediction = self.reader.logits(model, batch)[:, 0]
        each = (prediction - batch["label"]).square()
        return each.sum(), {"prediction": prediction.detach(), "loss": each.detach()}

    def metrics(self) -> Any:
        from torchmetrics import (
            MeanAbsoluteError,
            MetricCollection,
            PearsonCorrCoef,
            SpearmanCorrCoef,
        )

        metrics: Any = {
            "spearman": SpearmanCorrCoef(),
            "pearson": PearsonCorrCoef(),
            "mean_absolute_error": MeanAbsoluteError(),
        }
        return MetricCollection(metrics, compute_groups=False).set_dtype(torch.float64)

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        # The sums are in host memory if the device has no float64.
        device = metrics["pearson"].device
        prediction = outputs["prediction"].to(device).double()
        metrics.update(prediction, batch["label"].to(device).double())

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        return {"prediction": outputs["prediction"].float().tolist()}

    def show(self, sample: tuple[Any, float], outputs: dict[str, Tensor]) -> dict[str, Any]:
        text, number = sample
        return {
            "text": self.reader.decode(text),
            "target": f"{number:.4g}",
            "prediction": f"{float(outputs['prediction']):.4g}",
        }


def _may_be_number(kind: Any) -> bool:
    """Whether a column of this type holds numbers, or texts that may be numbers."""
    dtype = str(getattr(kind, "dtype", ""))
    is_number = element_type(kind) is None and dtype.startswith(("float", "int", "uint"))
    return is_number or is_text(kind)
