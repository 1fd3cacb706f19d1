"""What an evaluation measures beside the loss: sums over samples, and the metrics that they make.

A task's ``metrics()`` returns a new :class:`Metrics`, or a ``torchmetrics.MetricCollection``; its ``update`` feeds it.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Metrics(Protocol):
    """What is measured in one evaluation."""

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """The metrics by name, and whether a larger one is the better."""

    def to(self, device: torch.device) -> Any:
        """Itself, with its sums on the device."""

    def sums(self) -> Sequence[Tensor]:
        """Its state: tensors that are summed over the ranks, in place, before :meth:`compute`."""

    def compute(self) -> Mapping[str, Any]:
        """Metrics by name, as numbers or tensors of one element; also a confusion matrix, (classes, classes)."""


class ClassCounts:
    """Accuracy, the mean F1 of the classes (of two also that of the second), Matthews' correlation, and the confusion
    matrix (rows are true classes).

    Args:
        classes: how many. Above ``pictured`` there is no matrix.
        top: count it too where the true class is among the so many likeliest (0: not).
        pictured: a larger matrix is no picture any more.
    """

    def __init__(self, classes: int, *, top: int = 0, pictured: int = 100) -> None:
        self.higher_is_better = {"accuracy": True, "macro_f1": True, "matthews": True}
        self.higher_is_better |= {"f1": True} if classes == 2 else {}
        self.top = top
        self.higher_is_better |= {f"top{top}_accuracy": True} if top else {}
        self._among = torch.zeros(1 if top else 0, dtype=torch.int64)
        self._matrix = torch.zeros((classes, classes) if classes <= pictured else (0, 0), dtype=torch.int64)
        self._counts = torch.zeros(3, classes, dtype=torch.int64)  # of each class: right, predicted, there

    def to(self, device: torch.device) -> "ClassCounts":
        self._matrix, self._counts, self._among = (x.to(device) for x in (self._matrix, self._counts, self._among))
        return self

    def update(self, logits: Tensor, target: Tensor) -> None:
        """Takes in samples; no host sync.

        Args:
            logits: (samples, classes).
            target: (samples,), the true classes; below 0 where a sample does not count. Or (samples, classes), their
                shares: the largest is the true one.
        """
        target = target.argmax(1) if target.ndim == 2 else target
        chosen = logits.argmax(1)
        ones = (target >= 0).to(target.dtype)
        target = target.clamp(min=0)
        right, predicted, there = self._counts
        right.index_add_(0, target, (chosen == target).to(target.dtype) * ones)
        predicted.index_add_(0, chosen, ones)
        there.index_add_(0, target, ones)
        if self.top:
            self._among += ((logits.topk(self.top).indices == target[:, None]).any(1).to(target.dtype) * ones).sum()
        if self._matrix.numel():
            self._matrix.view(-1).index_add_(0, target * len(self._matrix) + chosen, ones)

    def sums(self) -> Sequence[Tensor]:
        return [sums for sums in (self._counts, self._matrix, self._among) if sums.numel()]

    def compute(self) -> dict[str, Any]:
        """F1 is 2 right / (predicted + there), averaged over the classes that occur (as torchmetrics does). Matthews'
        correlation is that of several classes (Gorodkin 2004); 0 where only one is there, or only one predicted."""
        right, predicted, there = self._counts.double().cpu()
        occurs = predicted + there > 0
        f1 = 2 * right / (predicted + there).clamp(min=1)
        metrics: dict[str, Any] = {"accuracy": float(right.sum() / there.sum()), "macro_f1": float(f1[occurs].mean())}
        total = there.sum()
        spread = math.sqrt(float((total**2 - (predicted**2).sum()) * (total**2 - (there**2).sum())))
        together = float(right.sum() * total - (predicted * there).sum())
        metrics["matthews"] = together / spread if spread else 0.0
        metrics |= {"f1": float(f1[1])} if len(f1) == 2 else {}
        metrics |= {f"top{self.top}_accuracy": float(self._among.double() / total)} if self.top else {}
        return metrics | ({"confusion": self._matrix} if self._matrix.numel() else {})


class TextSums:
    """Perplexity and accuracy per token, bits per byte of text, and the share of texts that are wholly right.

    Args:
        by_bytes: whether it is known how many bytes each token is of.
        whole: whether texts are counted.
    """

    def __init__(self, *, by_bytes: bool = True, whole: bool = False) -> None:
        self.higher_is_better = {"perplexity": False, "accuracy": True}
        self.higher_is_better |= {"bits_per_byte": False} if by_bytes else {}
        self.higher_is_better |= {"exact": True} if whole else {}
        self._sums = torch.zeros(6, dtype=torch.float64)
        """nats, tokens, of them right, bytes, texts, of them wholly right"""

    def to(self, device: torch.device) -> "TextSums":
        self._sums = self._sums.to(device, torch.float32 if device.type == "mps" else torch.float64)
        return self

    def update(
        self, nats: Tensor, tokens: Tensor, *, right: Tensor, text: Tensor | None = None, whole: Tensor | None = None
    ) -> None:
        """Takes in sums of a micro-batch; no host sync.

        Args:
            nats: its loss, 0-dim.
            tokens: its target tokens, 0-dim.
            right: those of them that are the likeliest, 0-dim.
            text: their bytes, 0-dim.
            whole: (texts,), whether all tokens of each are right.
        """
        none = torch.zeros_like(tokens)
        sums = [nats, tokens, right, none if text is None else text]
        sums += [none, none] if whole is None else [none + len(whole), whole.sum()]
        self._sums += torch.stack([one.to(self._sums.dtype) for one in sums])

    def sums(self) -> Sequence[Tensor]:
        return [self._sums]

    def compute(self) -> dict[str, float]:
        nats, tokens, right, text, texts, whole = self._sums.tolist()
        metrics = {"perplexity": math.exp(min(nats / tokens, 700.0)), "accuracy": right / tokens}
        if "bits_per_byte" in self.higher_is_better:
            metrics["bits_per_byte"] = nats / math.log(2) / text if text else math.nan
        if "exact" in self.higher_is_better:
            metrics["exact"] = whole / texts if texts else math.nan
        return metrics


# --- torchmetrics -----------------------------------------------------------------------------------------------------


class _Collection:
    """A torchmetrics.MetricCollection as :class:`Metrics`; it reduces over the ranks itself. Raises ValueError if a
    metric computes several unnamed values."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    @property
    def higher_is_better(self) -> Mapping[str, bool]:
        """Whether larger is better, by the name of each logged metric (found by computing each metric of nothing)."""
        return {
            logged: bool(metric.higher_is_better)
            for name, metric in self._collection.items()
            if not _is_matrix(metric)
            for logged in _names_of(name, metric)
        }

    def to(self, device: torch.device) -> Any:
        self._collection = self._collection.to(device)
        return self

    def sums(self) -> Sequence[Tensor]:
        return ()

    def compute(self) -> dict[str, Tensor]:
        values: dict[str, Tensor] = self._collection.compute()
        matrices = {name for name, metric in self._collection.items() if _is_matrix(metric)}
        return {name: value for name, value in values.items() if name in matrices or value.numel() == 1}


def _names_of(name: str, metric: Any) -> Sequence[str]:
    empty = _of_nothing(metric)
    if isinstance(empty, Tensor) and empty.numel() != 1:
        advice = "wrap it in torchmetrics' ClasswiseWrapper, or average it"
        raise ValueError(f"the metric {name!r} returns {empty.numel()} values without names; {advice}")
    return list(empty) if isinstance(empty, dict) else [name]


def _of_nothing(metric: Any) -> Any:
    """What the metric computes before it has seen anything: of the shape of its results. None where it rejects."""
    try:
        empty = metric.clone()
        for part in empty.modules():  # a wrapper's metrics too
            part.distributed_available_fn = lambda: False  # no rank waits for another
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return empty.compute()
    except Exception:
        return None


def _is_matrix(metric: Any) -> bool:
    """Whether it is a confusion matrix: a picture, not a metric."""
    return type(metric).__name__.endswith("ConfusionMatrix")


# --- of a task --------------------------------------------------------------------------------------------------------


def prefix(name: str) -> str:
    """How a set's metrics are headed: the validation set's are the evaluation."""
    return "eval" if name == "validation" else name


def adapted(metrics: Any) -> Metrics:
    """What a task's ``metrics()`` returned, as :class:`Metrics`.

    Raises:
        ValueError: it is nothing that measures.
    """
    if hasattr(metrics, "sums"):
        return metrics  # type: ignore[no-any-return]
    if not hasattr(metrics, "items") or not hasattr(metrics, "compute"):
        needed = "a torchmetrics.MetricCollection, or a tasks.metrics.Metrics (compute, to, sums, higher_is_better)"
        raise ValueError(f"task: metrics() returned a {type(metrics).__name__}, expected {needed}")
    return _Collection(metrics)


def directions(task: object) -> dict[str, bool]:
    """What :func:`oneloop.evaluate.evaluate` returns for this task by name, and whether a larger value is the better.

    Raises:
        ValueError: a metric computes several values without names.
    """
    known = dict(adapted(task.metrics()).higher_is_better) if hasattr(task, "metrics") else {}
    return {"loss": False, **known}


def scalars(computed: Mapping[str, Any]) -> dict[str, float]:
    """The metrics among what was computed."""
    return {name: float(value) for name, value in computed.items() if not _is_table(value)}


def confusion(task: object, computed: Mapping[str, Any]) -> dict[str, Any] | None:
    """The confusion matrix with its classes' names; None where there is none, or one for each label."""
    tables = [value for value in computed.values() if _is_table(value) and value.ndim == 2]
    if not tables:
        return None
    counts = tables[-1].tolist()
    classes = [str(name) for name in getattr(task, "classes", range(len(counts)))]
    classes = classes if len(classes) == len(counts) else [str(number) for number in range(len(counts))]
    return {"classes": classes, "counts": counts}


def _is_table(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 1
