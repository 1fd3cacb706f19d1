"""Metrics of classes: accuracy, F1, Matthews correlation and the confusion matrix."""

import math
from typing import Any

from torch import Tensor

from oneloop.basics.wide_sums import on_host
from oneloop.tasks.light_metrics import Means


class ClassCounts(Means):
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
    number: Tensor

    def __init__(
        self, classes: int, *, top: int = 0, matrix_limit: int = 100, number: str = ""
    ) -> None:
        in_top = f"top{top}_accuracy"
        better: dict[str, bool | None] = {"accuracy": True, "macro_f1": True, "matthews": True}
        if classes == 2:
            better["f1"] = True
        if top:
            better[in_top] = True
        if number:
            better[number] = False
        super().__init__(better)
        self.names = ["accuracy", in_top] if top else ["accuracy"]
        self.top = top
        self._named = number
        side = classes if classes <= matrix_limit else 0
        self.add_counts("counts", 3, classes)
        self.add_counts("matrix", side, side)
        self.add_counts("number")

    def update(  # type: ignore[override]
        self, logits: Tensor, target: Tensor
    ) -> None:
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
        right = (prediction == target).to(target.dtype) * counted
        positives, predicted, targets = self.counts
        positives.index_add_(0, target, right)
        predicted.index_add_(0, prediction, counted)
        targets.index_add_(0, target, counted)
        values = {"accuracy": (right, counted)}
        if self.top:
            is_in_top = (logits.topk(self.top).indices == target[:, None]).any(1)
            values[f"top{self.top}_accuracy"] = (is_in_top * counted, counted)
        super().update(values)
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
            **super().compute(),
            "macro_f1": float(f1[occurs].mean()),
            "matthews": covariance / spread if spread else 0.0,
            "f1": float(f1[1]) if len(f1) == 2 else None,
            self._named: float(self.number),
        }
        metrics: dict[str, Any] = {name: values[name] for name in self.higher_is_better}
        if self.matrix.numel():
            metrics["confusion"] = self.matrix
        return metrics
