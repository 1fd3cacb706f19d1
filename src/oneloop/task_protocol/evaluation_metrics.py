"""Evaluation metrics besides the loss: metrics of torchmetrics, their names, directions and values.

A task's ``metrics()`` returns a new ``torchmetrics.Metric``, a ``MetricCollection``, or a dict of
metrics; its ``update`` feeds them.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from oneloop.basics.wide_sums import wide_dtype

_HOST = torch.device("cpu")


def prefix(name: str) -> str:
    """Return the prefix of the metrics of a set: ``eval`` for validation, else its name."""
    return "eval" if name == "validation" else name


def make_metrics(task: Any, member: str, device: torch.device = _HOST) -> Any:
    """Return new metrics of a task. Each computes from its own states, without the other ranks.

    On a device without float64, metrics in float64 stay in host memory. The task's ``update`` then
    moves its values to the ``device`` of the metric.

    Args:
        task: has ``metrics`` or ``generated_metrics``.
        member: the name of this method.
        device: of the batches.

    Raises:
        ValueError: the method returned something else than metrics.
    """
    metrics = getattr(task, member)()
    if isinstance(metrics, dict):
        from torchmetrics import MetricCollection

        metrics = MetricCollection(metrics)
    if not isinstance(metrics, nn.Module) or not hasattr(metrics, "compute"):
        raise ValueError(
            f"task: {member}() returned a {type(metrics).__name__}, expected a torchmetrics.Metric,"
            " a MetricCollection or a dict of metrics; let a class with sums() derive from "
            'torchmetrics.Metric, and declare each sum: add_state(NAME, zeros, dist_reduce_fx="sum"'
            ")"
        )
    dtypes = set()
    for metric in metrics_inside(metrics):
        metric.distributed_available_fn = _never
        states = metric._defaults.values()
        dtypes |= {getattr(one, "dtype", None) for one in (metric, *states)}
    if torch.float64 in dtypes and wide_dtype(device) is not torch.float64:
        return metrics
    return metrics.to(device)


def metrics_inside(value: Any) -> Iterator[Any]:
    """Yield a metric and all metrics inside it, also in its lists and dicts."""
    if hasattr(value, "_reductions"):
        yield value
    if isinstance(value, nn.Module):
        for held in tree_leaves(vars(value)):
            yield from metrics_inside(held)


def by_name(metrics: Any) -> dict[str, Any]:
    """Return each metric of a collection by name; a single metric has the name of its class."""
    if hasattr(metrics, "items"):
        return dict(metrics.items())
    return {type(metrics).__name__: metrics}


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
    members = ("metrics", "generated_metrics") if generated else ("metrics",)
    for member in members:
        if not hasattr(task, member):
            continue
        for name, metric in by_name(make_metrics(task, member)).items():
            upward = _directions_of(name, metric)
            check_names(upward, member, taken=known)
            known |= upward
    return known


def check_names(names: Iterable[str], member: str, *, taken: Iterable[str] = ("loss",)) -> None:
    """Raise ValueError if a metric has the name of the loss, or of another metric.

    Args:
        names: of metrics.
        member: the task's method that makes them, for the message.
        taken: the other names.
    """
    for name in names:
        if name in taken or name.startswith("loss/"):
            raise ValueError(
                f"the metric {name!r} has the name of the loss of each evaluation, or of another "
                f"metric; rename it in {member}()"
            )


def _directions_of(name: str, metric: Any) -> dict[str, bool | None]:
    """Return whether larger is better by logged name: those of a dict, or the metric's own name."""
    # torchmetrics' ClasswiseWrapper has the direction of the metric inside.
    upward = getattr(getattr(metric, "metric", metric), "higher_is_better", None)
    if isinstance(upward, Mapping):
        return dict(upward)

    # Compute without samples, which shows the names of the results.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty = metric.compute()
    except Exception:
        return {name: upward}
    if isinstance(empty, Mapping):
        return dict.fromkeys(empty, upward)
    if not isinstance(empty, Tensor) or empty.numel() == 1:
        return {name: upward}
    if empty.ndim == 1:
        raise ValueError(
            f"the metric {name!r} returns {empty.numel()} values without names; {_REMEDY}"
        )
    return {}


_REMEDY = "wrap it in torchmetrics' ClasswiseWrapper, or average it"


def named_values(metrics: Any, computed: Any) -> dict[str, Tensor]:
    """Return what metrics have computed, by name, also plain and numpy numbers.

    Args:
        metrics: of :func:`make_metrics`.
        computed: what their ``compute`` has returned.

    Raises:
        ValueError: a value is not a number.
    """
    if not isinstance(computed, Mapping):
        computed = dict.fromkeys(by_name(metrics), computed)
    values = {}
    for name, value in computed.items():
        if isinstance(value, Tensor):
            values[name] = value
            continue
        try:
            values[name] = torch.as_tensor(value, dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"the metric {name!r} computes a {type(value).__name__}, which is not a number"
            ) from error
    return values


def scalars(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the metrics that are one number, which are logged."""
    return {name: float(value) for name, value in values.items() if value.numel() == 1}


def not_logged(values: Mapping[str, Tensor]) -> list[str]:
    """Return a line for each value that is neither logged, as a number, nor drawn, as a matrix."""
    lines = []
    for name, value in values.items():
        if value.numel() != 1 and not is_matrix(value):
            shape = " x ".join(map(str, value.shape))
            lines.append(
                f"the metric {name!r} has {shape} values: neither logged nor drawn; {_REMEDY}"
            )
    return lines


_MOST_DRAWN = 200**2  # numbers of a matrix


def is_matrix(value: Tensor) -> bool:
    """Whether a value is a matrix, or one of 2 x 2 for each label, small enough to be drawn."""
    drawn = value.ndim == 2 or value.shape[1:] == (2, 2)
    return drawn and 1 < value.numel() <= _MOST_DRAWN


def _never() -> bool:
    return False
