"""A torchmetrics.MetricCollection as :class:`oneloop.task_protocol.evaluation_metrics.Metrics`."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.wide_sums import wide_dtype

_REMEDY = "wrap it in torchmetrics' ClasswiseWrapper, or average it"


class Collection:
    """A torchmetrics.MetricCollection as :class:`Metrics`; torchmetrics reduces over the ranks.

    Raises ValueError if a metric computes several unnamed values, or something that is not a
    number."""

    def __init__(self, collection: Any) -> None:
        self._collection = collection

    @property
    def higher_is_better(self) -> Mapping[str, bool | None]:
        """Whether larger is better, by logged name.

        The names come from computing each metric without samples.
        """
        known: dict[str, bool | None] = {}
        for name, metric in self._collection.items():
            if not _is_matrix(metric):
                known.update(dict.fromkeys(_names_of(name, metric), _direction(metric)))
        return known

    def to(self, device: torch.device) -> Any:
        self._collection = self._collection.to(device)
        return self

    def sums(self) -> Sequence[Tensor]:
        return ()

    def compute(self) -> dict[str, Tensor]:
        values = self._values()
        return {name: value for name, value in values.items() if self._is_chosen(name, value)}

    def left_out(self) -> list[str]:
        """Return a line for each value that :meth:`compute` leaves out."""
        values = self._values().items()
        return [
            _left_out(name, value) for name, value in values if not self._is_chosen(name, value)
        ]

    def _values(self) -> dict[str, Tensor]:
        computed = self._collection.compute()
        return {name: as_tensor(name, value) for name, value in computed.items()}

    def _is_chosen(self, name: str, value: Tensor) -> bool:
        """Return whether a value is one number, or that of a confusion matrix."""
        metrics = dict(self._collection.items())
        return value.numel() == 1 or (name in metrics and _is_matrix(metrics[name]))


def on_device(metrics: Any, device: torch.device) -> Any:
    """Return the metrics of a task on a device.

    On a device without float64, torchmetrics in float64 stay in host memory. The task's ``update``
    then moves its values to the ``device`` of the metric.

    Args:
        metrics: the result of its ``metrics()``.
        device: of the batches.
    """
    if isinstance(metrics, nn.Module) and wide_dtype(device) is not torch.float64:
        dtypes = []
        for metric in metrics.modules():
            states = getattr(metric, "_defaults", {}).values()  # of torchmetrics
            dtypes += [getattr(one, "dtype", None) for one in (metric, *states)]
        if torch.float64 in dtypes:
            return metrics
    return metrics.to(device)


def not_logged(computed: Mapping[str, Any]) -> list[str]:
    """Return a line for each value that is neither logged, as a number, nor drawn, as a matrix."""
    lines = []
    for name, value in computed.items():
        number = as_tensor(name, value)
        drawn = number.ndim == 2 or number.shape[1:] == (2, 2)  # a matrix, or one for each label
        if number.numel() != 1 and not drawn:
            lines.append(_left_out(name, number))
    return lines


def _left_out(name: str, value: Tensor) -> str:
    shape = " x ".join(map(str, value.shape))
    return f"the metric {name!r} has {shape} values: neither logged nor drawn; {_REMEDY}"


def _direction(metric: Any) -> bool | None:
    """Return whether a larger value of a metric is better; of a wrapper, as of what it wraps."""
    own = metric.higher_is_better
    if own is not None:
        return bool(own)
    if type(metric).__name__ == "CompositionalMetric":
        return None  # an expression, such as 1 - accuracy
    inside = {_direction(child) for child in metric.modules() if _is_metric(child, metric)}
    return inside.pop() if len(inside) == 1 else None


def _is_metric(module: Any, outer: Any) -> bool:
    return module is not outer and hasattr(module, "higher_is_better")


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a value that a metric computed, also a plain or numpy number.

    Raise ValueError if it is something else.
    """
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the metric {name!r} computes a {type(value).__name__}, which is not a number"
        ) from error


def _names_of(name: str, metric: Any) -> Sequence[str]:
    """Return the names under which a metric is logged."""
    empty = _compute_empty(metric)
    if isinstance(empty, dict):
        return list(empty)
    if isinstance(empty, Tensor) and empty.numel() != 1:
        raise ValueError(
            f"the metric {name!r} returns {empty.numel()} values without names; {_REMEDY}"
        )
    return [name]


def _compute_empty(metric: Any) -> Any:
    """Return what a metric computes without samples; None if it raises.

    This shows the shape of its results.
    """
    try:
        # Switch off collectives, also of metrics inside wrappers.
        empty = metric.clone()
        for module in empty.modules():
            module.distributed_available_fn = lambda: False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return empty.compute()
    except Exception:
        return None


def _is_matrix(metric: Any) -> bool:
    """Whether a metric is a confusion matrix, which is drawn and not logged."""
    return type(metric).__name__.endswith("ConfusionMatrix")
