"""Metrics of classes: accuracy, F1, Matthews correlation and the confusion matrix."""

import math
from typing import Any

from torch import Tensor

from oneloop.basics.wide_sums import on_host
from oneloop.tasks.light_metrics import LightMetric


class ClassCounts(LightMetric):
    """Accuracy, macro F1, Matthews correlation coefficient, and the confusion matrix.

    With two classes also the F1 of the second. The rows of the matrix are the true classes.

    Args:
        classes: number of classes.
        top: k of an additional top-k accuracy (0: none).
        matrix_limit: maximum number of classes for a confusion matrix.
        number: name of a number to minimize, which the task adds up in ``number``; empty: none.
    """

    counts: Tensor  # true positives, predictions and targets of each class
    matrix: Tensor  # without elements if there are too many classes
    in_top: Tensor
    number: Tensor

    def __init__(
        self, classes: int, *, top: int = 0, matrix_limit: int = 100, number: str = ""
    ) -> None:
        better: dict[str, bool | None] = {"accuracy": True, "macro_f1": True, "matthews": True}
        if classes == 2:
            better["f1"] = True
        if top:
            better[f"top{top}_accuracy"] = True
        if number:
            better[number] = False
        super().__init__(better)
        self.top = top
        self._named = number
        side = classes if classes <= matrix_limit else 0
        self.add_counts("counts", 3, classes)
        self.add_counts("matrix", side, side)
        self.add_counts("in_top")
        self.add_counts("number")

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Add samples to the counts, without a host sync.

        Args:
            logits: (samples, classes).
            target: (samples,), the true classes; negative targets are ignored. Or (samples,
                classes), class probabilities; the class with the largest one counts as true.
        """
        if target.ndim == 2:
            target = target.argmax(1)
        prediction = logits.argmax(1)

        # Multiply by 0 what does not count: boolean indexing would be a host sync.
        counted = (target >= 0).to(target.dtype)
        target = target.clamp(min=0)
        right, predicted, targets = self.counts
        right.index_add_(0, target, (prediction == target).to(target.dtype) * counted)
        predicted.index_add_(0, prediction, counted)
        targets.index_add_(0, target, counted)
        if self.top:
            is_in_top = (logits.topk(self.top).indices == target[:, None]).any(1)
            self.in_top += (is_in_top.to(target.dtype) * counted).sum()
        if self.matrix.numel():
            # The entry of a pair of classes in the flattened matrix.
            self.matrix.view(-1).index_add_(0, target * len(self.matrix) + prediction, counted)

    def compute(self) -> dict[str, Any]:
        """Return the metrics by name, and the matrix as ``confusion``."""
        right, predicted, targets = on_host(self.counts)
        total = targets.sum()

        # F1 is 2 right / (predicted + targets), averaged over occurring classes (as torchmetrics).
        f1 = 2 * right / (predicted + targets).clamp(min=1)
        occurs = predicted + targets > 0

        # The multiclass coefficient of Matthews (Gorodkin 2004); 0 if only one class occurs or is
        # predicted.
        covariance = float(right.sum() * total - (predicted * targets).sum())
        spread_of_predicted = total**2 - (predicted**2).sum()
        spread_of_targets = total**2 - (targets**2).sum()
        spread = math.sqrt(float(spread_of_predicted * spread_of_targets))

        # Leave out what only some tasks have.
        values = {
            "accuracy": float(right.sum() / total),
            "macro_f1": float(f1[occurs].mean()),
            "matthews": covariance / spread if spread else 0.0,
            "f1": float(f1[1]) if len(f1) == 2 else None,
            f"top{self.top}_accuracy": float(on_host(self.in_top) / total),
            self._named: float(self.number),
        }
        metrics: dict[str, Any] = {name: values[name] for name in self.higher_is_better}
        if self.matrix.numel():
            metrics["confusion"] = self.matrix
        return metrics
