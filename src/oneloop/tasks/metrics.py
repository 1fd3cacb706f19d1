"""What a task's metrics are called, which way is better, and which are figures: torchmetrics knows most of it."""

from __future__ import annotations

import warnings
from typing import Any

import torch


def prefix(name: str) -> str:
    """How a set's figures are headed: the validation set's are the evaluation."""
    return "eval" if name == "validation" else name


def metric_names(task: object) -> set[str]:
    """Names of what :func:`oneloop.evaluate.evaluate` returns for this task.

    Raises:
        ValueError: a metric computes several values without names.
    """
    names = set(_figures(task))
    if hasattr(task, "summarize"):
        names = set(task.summarize(dict.fromkeys(names, 1.0)))
    return names | {"loss"}


def higher_is_better(task: object, metric: str) -> bool:
    """Whether a larger value of ``eval/<metric>`` is the better one: as torchmetrics says, and False for a loss."""
    known = _figures(task).get(metric.rpartition("/")[2])
    return bool(known is not None and known.higher_is_better)


def single_values(task: object, computed: dict[str, torch.Tensor]) -> dict[str, float]:
    """The figures among what the metrics have computed, summarized by the task where it does so."""
    values = {name: float(value) for name, value in computed.items() if value.numel() == 1}
    return task.summarize(values) if hasattr(task, "summarize") else values


def confusion(task: object, metrics: Any, computed: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    """The confusion matrix with its classes' names; None where there is none, or one for each label."""
    matrices = [computed[name] for name, metric in metrics.items() if _is_matrix(metric)]
    whole = [matrix.tolist() for matrix in matrices if matrix.ndim == 2]
    if not whole:
        return None
    counts = whole[-1]
    classes = [str(name) for name in getattr(task, "classes", range(len(counts)))]
    return {
        "classes": classes if len(classes) == len(counts) else [str(n) for n in range(len(counts))],
        "counts": counts,
    }


def _figures(task: object) -> dict[str, Any]:
    """The metric behind each figure, under the metric's name, or under those that it gives its several figures."""
    figures: dict[str, Any] = {}
    for name, metric in task.metrics().items() if hasattr(task, "metrics") else ():
        if _is_matrix(metric):
            continue
        empty = _of_nothing(metric)
        if isinstance(empty, torch.Tensor) and empty.numel() != 1:
            raise ValueError(
                f"the metric {name!r} computes {empty.numel()} values without names; wrap it in torchmetrics'"
                " ClasswiseWrapper, or average it"
            )
        figures |= dict.fromkeys(empty if isinstance(empty, dict) else [name], metric)
    return figures


def _of_nothing(metric: Any) -> Any:
    """What the metric computes before it has seen anything: of the shape of its results. None where it refuses."""
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
    """Whether it is a confusion matrix: a picture, not a figure."""
    return type(metric).__name__.endswith("ConfusionMatrix")
