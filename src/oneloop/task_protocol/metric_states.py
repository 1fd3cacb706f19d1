"""Metrics of an evaluation over all ranks: computed as if one process had seen every micro-batch.

There are two ways. States that are sums, extremes or lists are combined; torchmetrics itself aborts
if ranks have lists of different lengths. The inputs of all other metrics are recorded, and replayed
on every rank in the order of the data.
"""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.utils._pytree import tree_map_only

from oneloop.task_protocol.evaluation_metrics import by_name, metrics_inside, named_values

_REDUCED = {"dim_zero_sum", "dim_zero_max", "dim_zero_min"}
"""torchmetrics reductions of tensors that are the same on any number of ranks, except for sums that
round"""

_PASS_ON = {
    "BinaryTargetTransformer",
    "ClasswiseWrapper",
    "CompositionalMetric",
    "LambdaInputTransformer",
    "MinMaxMetric",
    "MultioutputWrapper",
    "MultitaskWrapper",
}
"""torchmetrics classes that only pass their inputs on to the metrics inside"""


class RankMetrics:
    """The metrics of one evaluation, of this rank's micro-batches.

    Lists are joined in order of rank, which is the order of micro-batches.

    Args:
        metrics: of :func:`oneloop.task_protocol.evaluation_metrics.make_metrics`.
        add: the task's method that adds a micro-batch to them.
        ranks: number of ranks whose micro-batches are combined; 1: this rank sees all of them.
        exact: results do not depend on the number of ranks, not even in the last bit.
    """

    def __init__(self, metrics: Any, add: Any, *, ranks: int = 1, exact: bool = False) -> None:
        self._metrics = metrics
        self._add = add
        self._ranks = ranks
        self._idle = True  # whether this rank has no micro-batch

        # Choose the way of each metric.
        self._combined = list[Any]()
        self._recorded = list[_RecordedUpdates]()
        for outer in by_name(metrics).values():
            inside = [*metrics_inside(outer)]
            can_combine = all(_can_combine(metric, exact=exact) for metric in inside)
            if any(map(_keeps_others, inside)) or (ranks > 1 and not can_combine):
                self._recorded.append(_RecordedUpdates(outer))
            elif ranks > 1:
                self._combined += inside

        # With shared states, a metric would miss recorded inputs.
        if self._recorded:
            metrics._enable_compute_groups = False
            metrics._groups_checked = False

    def update(self, batch: Any, outputs: Any) -> None:
        """Add a micro-batch that counts, and its outputs, or what was generated for it."""
        self._idle = False
        self._add(self._metrics, batch, outputs)

    def compute(self) -> dict[str, Tensor]:
        """Return the values of all ranks by name. Collective: call on every rank."""
        # Exchange the states and the recorded inputs.
        if self._combined and hasattr(self._metrics, "values"):
            self._metrics.values()  # fills the states of metrics that share those of another
        own_states = []
        for metric in self._combined:
            own_states.append({name: _on_host(getattr(metric, name)) for name in metric._defaults})
        ranks = [(own_states, [recorded.calls for recorded in self._recorded])]
        if self._ranks > 1:
            ranks = gather_object(ranks)  # type: ignore[no-untyped-call]

        # Combine and compute. A rank without a micro-batch may lack attributes that an update sets.
        result = list[Any]([None])
        if not self._idle:
            for number, metric in enumerate(self._combined):
                _combine(metric, [states[number] for states, _ in ranks])
            for number, recorded in enumerate(self._recorded):
                recorded.replay([call for _, calls in ranks for call in calls[number]])
            values = named_values(self._metrics, self._metrics.compute())
            result = [_on_host(values)]

        # Runs decide by these values: all ranks take those of rank 0.
        broadcast_object_list(result)  # type: ignore[no-untyped-call]
        return dict(result[0])


def _can_combine(metric: Any, *, exact: bool) -> bool:
    """Whether the states of all ranks together are those of one process.

    Lists are: one process only appends to them. ``exact``: sums must not round.
    """
    for name, reduction in metric._reductions.items():
        default = metric._defaults[name]
        if isinstance(default, list):
            continue
        kind = getattr(reduction, "__name__", None)
        rounds = kind == "dim_zero_sum" and (default.is_floating_point() or default.is_complex())
        if kind not in _REDUCED or (exact and rounds):
            return False
    return True


def _keeps_others(metric: Any) -> bool:
    """Whether a metric does something else with the metrics inside than pass its inputs on.

    Examples are a window of the last micro-batches, and a bootstrap.
    """
    return type(metric).__name__ not in _PASS_ON and len([*metrics_inside(metric)]) > 1


def _combine(metric: Any, ranks: list[Mapping[str, Any]]) -> None:
    """Set a metric's states to those of all ranks together."""
    metric._computed = None
    device = "cpu" if getattr(metric, "compute_on_cpu", True) else metric.device
    for name, default in metric._defaults.items():
        states = [states[name] for states in ranks]
        if isinstance(default, list):
            joined = [one for own in states for one in own]
            setattr(metric, name, _on_device(joined, device))
            continue
        reduced = metric._reductions[name](torch.stack(states)).to(states[0].dtype)
        setattr(metric, name, reduced.to(getattr(metric, name).device))


def _on_host(value: Any) -> Any:
    """Return a copy in host memory; a later change in place does not reach it."""
    return tree_map_only(Tensor, lambda one: one.detach().to("cpu", copy=True), value)


def _on_device(value: Any, device: torch.device | str) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(device), value)


class _RecordedUpdates:
    """Records the update() calls of a metric, and replays those of all ranks in order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._update = metric.update
        self.calls: list[Any] = []
        metric.update = self._record
        metric.forward = self._record

    def _record(self, *given: Any, **named: Any) -> None:
        self.calls.append(_on_host((given, named)))

    def replay(self, calls: list[Any]) -> None:
        """Update the metric with these inputs, where it is: it may have stayed in host memory."""
        torch.manual_seed(0)  # some metrics draw random numbers (bootstrap)
        for given, named in _on_device(calls, self._metric.device):
            self._update(*given, **named)
