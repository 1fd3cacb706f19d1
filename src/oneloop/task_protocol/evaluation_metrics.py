"""Evaluation metrics besides the loss: sums over samples, and metrics computed from the sums.

A task's ``metrics()`` returns a new :class:`Metrics`, or a ``torchmetrics.MetricCollection``; its
``update`` feeds it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from oneloop.basics.wide_sums import WideSum, on_host, widest
from oneloop.task_protocol.metric_collection import Collection, as_tensor


class Metrics(Protocol):
    """The metrics of one evaluation."""

    @property
    def higher_is_better(self) -> Mapping[str, bool | None]:
        """Metric names, and whether a larger value is better (None: unknown)."""

    def to(self, device: torch.device) -> Any:
        """Move the sums to the device, and return itself."""

    def sums(self) -> Sequence[Tensor]:
        """Return the state: tensors that are summed over the ranks before :meth:`compute`.

        They are changed in place.
        """

    def compute(self) -> Mapping[str, Any]:
        """Return metrics by name, as numbers or one-element tensors.

        It may add matrices, as :func:`matrices` draws them.
        """


class ClassCounts:
    """Accuracy, macro F1, Matthews correlation coefficient, and the confusion matrix.

    With two classes also the F1 of the second. The rows of the matrix are the true classes.

    Args:
        classes: number of classes.
        top: k of an additional top-k accuracy (0: none).
        matrix_limit: maximum number of classes for a confusion matrix.
        number: name of a number to minimize, which the task adds up in ``number``; empty: none.
    """

    def __init__(
        self, classes: int, *, top: int = 0, matrix_limit: int = 100, number: str = ""
    ) -> None:
        self.top = top
        self._named = number
        self.higher_is_better: dict[str, bool | None] = {
            "accuracy": True,
            "macro_f1": True,
            "matthews": True,
        }
        if classes == 2:
            self.higher_is_better["f1"] = True
        if top:
            self.higher_is_better[f"top{top}_accuracy"] = True
        if number:
            self.higher_is_better[number] = False

        # Tensors without elements stand for metrics that are off.
        side = classes
        if classes > matrix_limit:
            side = 0
        self._counts = torch.zeros(3, classes, dtype=torch.int64)
        """true positives, predictions and targets of each class"""
        self._matrix = torch.zeros(side, side, dtype=torch.int64)
        self._in_top = torch.zeros(int(bool(top)), dtype=torch.int64)
        self.number = torch.zeros(int(bool(number)), dtype=torch.int64)

    def to(self, device: torch.device) -> "ClassCounts":
        self._matrix = self._matrix.to(device)
        self._counts = self._counts.to(device)
        self._in_top = self._in_top.to(device)
        self.number = self.number.to(device)
        return self

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
        right, predicted, targets = self._counts
        right.index_add_(0, target, (prediction == target).to(target.dtype) * counted)
        predicted.index_add_(0, prediction, counted)
        targets.index_add_(0, target, counted)
        if self.top:
            is_in_top = (logits.topk(self.top).indices == target[:, None]).any(1)
            self._in_top += (is_in_top.to(target.dtype) * counted).sum()
        if self._matrix.numel():
            # The entry of a pair of classes in the flattened matrix.
            self._matrix.view(-1).index_add_(0, target * len(self._matrix) + prediction, counted)

    def sums(self) -> Sequence[Tensor]:
        return [
            sums for sums in (self._counts, self._matrix, self._in_top, self.number) if sums.numel()
        ]

    def compute(self) -> dict[str, Any]:
        """Return the metrics by name, and the matrix as ``confusion``."""
        right, predicted, targets = on_host(self._counts)
        total = targets.sum()

        # F1 is 2 right / (predicted + targets), averaged over occurring classes (as torchmetrics).
        f1 = 2 * right / (predicted + targets).clamp(min=1)
        occurs = predicted + targets > 0
        metrics: dict[str, Any] = {
            "accuracy": float(right.sum() / total),
            "macro_f1": float(f1[occurs].mean()),
        }

        # The multiclass coefficient of Matthews (Gorodkin 2004); 0 if only one class occurs or is
        # predicted.
        covariance = float(right.sum() * total - (predicted * targets).sum())
        spread_of_predicted = total**2 - (predicted**2).sum()
        spread_of_targets = total**2 - (targets**2).sum()
        spread = math.sqrt(float(spread_of_predicted * spread_of_targets))
        metrics["matthews"] = covariance / spread if spread else 0.0

        # Add what only some tasks have.
        if len(f1) == 2:
            metrics["f1"] = float(f1[1])
        if self.top:
            metrics[f"top{self.top}_accuracy"] = float(on_host(self._in_top) / total)
        if self._named:
            metrics[self._named] = float(self.number)
        if self._matrix.numel():
            metrics["confusion"] = self._matrix
        return metrics


class TextSums:
    """Perplexity and accuracy per token, bits per byte, and the share of fully correct texts.

    Args:
        by_bytes: whether the number of bytes of each token is known.
        whole: whether to count fully correct texts (``exact``).
    """

    def __init__(self, *, by_bytes: bool = True, whole: bool = False) -> None:
        self.higher_is_better: dict[str, bool | None] = {"perplexity": False, "accuracy": True}
        if by_bytes:
            self.higher_is_better["bits_per_byte"] = False
        if whole:
            self.higher_is_better["exact"] = True
        self._sums = WideSum(6)
        """nats, tokens, correct tokens, bytes, texts, fully correct texts"""

    def to(self, device: torch.device) -> "TextSums":
        self._sums = self._sums.to(device)
        return self

    def update(
        self,
        nats: Tensor,
        tokens: Tensor,
        *,
        right: Tensor,
        text: Tensor | None = None,
        whole: Tensor | None = None,
    ) -> None:
        """Add the sums of a micro-batch, without a host sync.

        Args:
            nats: summed loss, 0-dim.
            tokens: number of target tokens, 0-dim.
            right: number of target tokens with the largest logit, 0-dim.
            text: number of bytes of the target tokens, 0-dim.
            whole: (texts,), whether all target tokens of a text are correct.
        """
        zero = torch.zeros_like(tokens)
        if text is None:
            text = zero
        sums = [nats, tokens, right, text, zero, zero]
        if whole is not None:
            sums[4:] = [zero + len(whole), whole.sum()]
        self._sums.add(torch.stack([*map(widest, sums)]))

    def sums(self) -> Sequence[Tensor]:
        return [self._sums.parts]

    def compute(self) -> dict[str, float]:
        nats, tokens, right, text, texts, whole = self._sums.value().tolist()
        metrics = {
            "perplexity": math.exp(min(nats / tokens, 700.0)),  # exp(710) overflows
            "accuracy": right / tokens,
        }
        if "bits_per_byte" in self.higher_is_better:
            metrics["bits_per_byte"] = _ratio(nats / math.log(2), text)
        if "exact" in self.higher_is_better:
            metrics["exact"] = _ratio(whole, texts)
        return metrics


def _ratio(part: float, whole: float) -> float:
    if not whole:
        return math.nan
    return part / whole


def prefix(name: str) -> str:
    """Return the prefix of the metrics of a set: ``eval`` for validation, else its name."""
    return "eval" if name == "validation" else name


def adapted(metrics: Any, member: str = "metrics") -> Metrics:
    """Return the metrics of a task as :class:`Metrics`.

    Args:
        metrics: the result of its ``metrics()``: a MetricCollection or :class:`Metrics`.
        member: the task's method that made them, for the message.

    Raises:
        ValueError: it is something else.
    """
    if has_sums(metrics):
        return metrics  # type: ignore[no-any-return]
    if not hasattr(metrics, "items") or not hasattr(metrics, "compute"):
        raise ValueError(
            f"task: {member}() returned a {type(metrics).__name__}, expected "
            "torchmetrics.MetricCollection or oneloop.task_protocol.evaluation_metrics.Metrics "
            "(compute, to, sums, higher_is_better)"
        )
    return Collection(metrics)


def has_sums(metrics: Any) -> bool:
    """Return whether metrics are :class:`Metrics`; a collection may have a metric of that name."""
    if isinstance(metrics, nn.Module):
        metrics = type(metrics)
    return callable(getattr(metrics, "sums", None))


def directions(task: object, *, generated: bool = False) -> dict[str, bool | None]:
    """Return the names of a task's evaluation metrics, and whether a larger value is better.

    The names are those of :func:`oneloop.evaluation.evaluate`.

    Args:
        task: with or without ``metrics``.
        generated: with its metrics of what it generates, too.

    Raises:
        ValueError: a metric computes several values without names, has the name of the loss, or two
            metrics have the same name.
    """
    known: dict[str, bool | None] = {"loss": False}
    makers = ["metrics"]
    if generated:
        makers.append("generated_metrics")
    for maker in makers:
        make = getattr(task, maker, None)
        if make is None:
            continue
        own = adapted(make(), maker).higher_is_better
        _check_names(own, maker)
        for name in own:
            if name in known:
                raise ValueError(
                    f"the metric {name!r} of generated_metrics() is also one of metrics(); rename "
                    "one of them"
                )
        known |= own
    return known


def scalars(values: Mapping[str, Any], member: str = "metrics") -> dict[str, float]:
    """Return the scalar metrics, without matrices.

    Args:
        values: computed metrics by name.
        member: the task's method that made the metrics, for the message.

    Raises:
        ValueError: a metric is named ``loss``.
    """
    _check_names(values, member)
    tensors = {name: as_tensor(name, value) for name, value in values.items()}
    return {name: float(value) for name, value in tensors.items() if not _is_table(value)}


def _check_names(names: Iterable[str], member: str) -> None:
    """Raise ValueError if a metric would replace the loss of an evaluation."""
    for name in names:
        if name == "loss" or name.startswith("loss/"):
            raise ValueError(
                f"the metric {name!r} has the name of the loss of each evaluation; rename it in "
                f"{member}()"
            )


_OF_LABELS = ("true negative", "false positive", "false negative", "true positive")


def matrices(task: object, computed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the matrices that metrics have computed, by name.

    A matrix of 2 x 2 for each label (torchmetrics' MultilabelConfusionMatrix) becomes one with a
    row for each label.

    Args:
        task: may name rows and columns in ``matrices``, ``{"NAME": (rows, columns)}``, and the
            classes of a square matrix in ``classes``. Others are numbered.
        computed: the metrics.

    Returns:
        ``rows`` and ``columns``, the names, and ``counts``, a list of numbers for each row.

    Raises:
        ValueError: the task has not as many names as a matrix has rows and columns.
    """
    classes = [*map(str, getattr(task, "classes", ()))]
    found: dict[str, Any] = {}
    for name, value in computed.items():
        if not _is_table(value):
            continue
        columns: Sequence[Any] = classes
        if value.ndim == 3 and value.shape[1:] == (2, 2):
            value = value.flatten(1)
            columns = _OF_LABELS
        if value.ndim != 2:
            continue

        # Take the names of the task, else those that fit, else numbers.
        names = getattr(task, "matrices", {}).get(name, (classes, columns))
        sizes = tuple(map(len, names))
        if sizes != value.shape and name in getattr(task, "matrices", {}):
            raise ValueError(
                f"task: matrices names {sizes[0]} rows and {sizes[1]} columns of {name!r}, which "
                f"has {value.shape[0]} and {value.shape[1]}; correct the names"
            )
        rows, columns = (
            [*map(str, given if len(given) == size else range(size))]
            for given, size in zip(names, value.shape, strict=True)
        )
        found[name] = {"rows": rows, "columns": columns, "counts": value.tolist()}
    return found


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1
