"""Metrics of an evaluation over all ranks: computed as if one process had seen every micro-batch.

torchmetrics itself aborts if ranks have lists of different lengths, and reduces some states in
another way than one process adds to them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.tensors import gathered
from oneloop.task_protocol.evaluation_metrics import has_sums

_EXACT = {"dim_zero_sum", "dim_zero_max", "dim_zero_min"}
"""torchmetrics reductions of tensors that do not depend on the number of ranks, except for
floating-point sums"""

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


class MetricStates:
    """The states of a task's metrics on this rank, to be combined with those of the other ranks.

    Lists are joined in order of rank, which is the order of micro-batches. Sums and extremes are
    reduced. The inputs of all other metrics are recorded, and replayed on every rank in one order.

    Args:
        metrics: a MetricCollection,
            :class:`oneloop.task_protocol.evaluation_metrics.Metrics`, or None.
        apart: keep floating-point sums apart for each micro-batch, so that results do not depend on
            the number of ranks.
        ranks: number of ranks.
    """

    def __init__(self, metrics: Any, *, apart: bool, ranks: int) -> None:
        self._metrics = metrics
        self._recorded = list[_RecordedUpdates]()
        recorded: set[int] = set()  # ids of metrics
        for outer in _outer(metrics):
            inside = [*_inside(outer)]
            exact = all(map(_is_exact, inside))
            wraps = any(map(_keeps_others, inside))
            if wraps or (not exact and (apart or ranks > 1)):
                self._recorded.append(_RecordedUpdates(outer))
                recorded |= {id(metric) for metric in inside}

        # Only this module combines the states of the ranks.
        compute_alone(metrics)
        self._shared = [one for one in _every(metrics) if id(one) not in recorded]
        self._floating = list[_FloatingSum]()
        if apart:
            self._floating += _floating_sums(metrics, self._shared)

        # With shared states, a metric would reset the others, or miss recorded inputs.
        if hasattr(metrics, "_enable_compute_groups") and (apart or self._recorded):
            metrics._enable_compute_groups = False
            metrics._groups_checked = False

    def clear(self) -> None:
        """Forget all micro-batches so far."""
        for recorded in self._recorded:
            recorded.calls.clear()
        reset_sums(self._metrics)
        for metric in self._shared:
            for name, default in metric._defaults.items():
                state = getattr(metric, name)
                is_list = isinstance(default, list)
                setattr(metric, name, [] if is_list else default.clone().to(state.device))

    def micro_batch(self) -> None:
        """Record that the metrics have seen a micro-batch."""
        for floating in self._floating:
            floating.take()

    def combine(self, accelerator: Any, *, each: int) -> None:
        """Give every rank the states of all ranks. Collective: call on every rank.

        Of :class:`oneloop.task_protocol.evaluation_metrics.Metrics`, only rank 0 gets the kept
        sums.

        Args:
            accelerator: of the ranks.
            each: most micro-batches of a rank.
        """
        # Add the metric sums of all micro-batches in one tree, the same for any number of ranks.
        for floating in self._floating:
            total = tree_sum(floating.gathered(each))
            if not accelerator.is_main_process:
                total = torch.zeros_like(total)
            floating.state().copy_(total)

        # Collect the states of each metric, and the recorded inputs.
        if hasattr(self._metrics, "values"):
            self._metrics.values()  # fills the states of metrics that share those of another
        own_states = []
        if accelerator.num_processes > 1:
            own_states = [_states_of(metric) for metric in self._shared]
        own_calls = [recorded.calls for recorded in self._recorded]
        if not own_states and not own_calls:
            return
        from accelerate.utils import gather_object

        ranks = gather_object([(own_states, own_calls)])  # type: ignore[no-untyped-call]

        # Combine them.
        for number, metric in enumerate(self._shared[: len(own_states)]):
            _combine(metric, [states[number] for states, _ in ranks])
        for number, recorded in enumerate(self._recorded):
            calls = [call for _, by_metric in ranks for call in by_metric[number]]
            recorded.replay(calls, accelerator.device)


def compute_alone(metrics: Any) -> None:
    """Let each torchmetrics metric compute from its own states, without the other ranks."""
    for metric in _every(metrics):
        metric.distributed_available_fn = _never


def reset_sums(metrics: Any) -> None:
    """Set the sums of :class:`oneloop.task_protocol.evaluation_metrics.Metrics` to zero."""
    if has_sums(metrics):
        for state in metrics.sums():
            state.zero_()


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Seed torch's generators in this context: some metrics draw random numbers (bootstrap)."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(0)
        yield


def _never() -> bool:
    return False


def _outer(metrics: Any) -> list[Any]:
    """Return the metrics of a torchmetrics collection."""
    if metrics is None or has_sums(metrics):
        return []
    return [*metrics.values()]


def _every(metrics: Any) -> list[Any]:
    """Return the metrics of a torchmetrics collection, and those inside them."""
    return [metric for outer in _outer(metrics) for metric in _inside(outer)]


def _inside(value: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """Yield a metric and all metrics inside it, also in its lists and dicts."""
    # Look at each object once.
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))

    # Find what it holds.
    held: Any = ()
    if isinstance(value, nn.Module):
        if hasattr(value, "_reductions"):
            yield value
        held = vars(value).values()
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, list | tuple):
        held = value
    for one in held:
        yield from _inside(one, seen)


def _is_exact(metric: Any) -> bool:
    """Whether the states of all ranks together are those of one process.

    Lists are: one process only appends to them.
    """
    for name, reduction in metric._reductions.items():
        default = metric._defaults[name]
        if isinstance(default, list):
            continue
        if getattr(reduction, "__name__", None) not in _EXACT or default.is_complex():
            return False
    return True


def _keeps_others(metric: Any) -> bool:
    """Whether a metric does something else with the metrics inside than pass its inputs on.

    Examples are a window of the last micro-batches, and a bootstrap.
    """
    return type(metric).__name__ not in _PASS_ON and len([*_inside(metric)]) > 1


def _states_of(metric: Any) -> dict[str, Any]:
    """Return copies of a metric's states in host memory."""
    states = {}
    for name, default in metric._defaults.items():
        state = getattr(metric, name)
        # A list may be concatenated by now.
        if isinstance(default, list) and not isinstance(state, list):
            state = [state]
        states[name] = _on_host(state)
    return states


def _combine(metric: Any, ranks: list[dict[str, Any]]) -> None:
    """Set a metric's states to those of all ranks together."""
    device = torch.device("cpu") if metric.compute_on_cpu else metric.device
    metric._computed = None
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


def _on_device(value: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(device), value)


class _RecordedUpdates:
    """Records the update() calls of a metric, and replays those of all ranks in order."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._update = metric.update
        self._forward = metric.forward
        self.calls: list[Any] = []
        metric.update = self._record
        metric.forward = self._compute_batch

    def _record(self, *given: Any, **named: Any) -> None:
        self.calls.append(_on_host((given, named)))

    def _compute_batch(self, *given: Any, **named: Any) -> Any:
        """Record, and return what the metric computes for this micro-batch alone."""
        self._record(*given, **named)
        self._restore()
        try:
            return self._metric.clone().forward(*given, **named)
        finally:
            self._metric.update = self._record
            self._metric.forward = self._compute_batch

    def _restore(self) -> None:
        self._metric.update = self._update
        self._metric.forward = self._forward

    def replay(self, calls: list[Any], device: torch.device) -> None:
        """Update the metric with these inputs, where it is: it may have stayed in host memory."""
        device = getattr(self._metric, "device", device)
        self._restore()
        with seeded(device):
            for given, named in _on_device(calls, device):
                self._metric.update(*given, **named)


@dataclass
class _FloatingSum:
    """A floating-point sum of a metric, with its values of each micro-batch."""

    metrics: Any
    name: str | int  # attribute of the state, or its index in ``metrics.sums()``
    values: list[Tensor] = field(default_factory=list)  # by micro-batch of this rank

    def state(self) -> Tensor:
        """Return the metric's own tensor. Look it up each time: torchmetrics may replace it."""
        state: Tensor
        if isinstance(self.name, int):
            state = self.metrics.sums()[self.name]
        else:
            state = getattr(self.metrics, self.name)
        return state

    def take(self) -> None:
        """Store the value of this micro-batch, and begin the next one at zero."""
        state = self.state()
        self.values.append(state.clone())
        state.zero_()

    def gathered(self, each: int) -> Tensor:
        """Return the values of all ranks, padded with zeros to ``each`` per rank. Collective."""
        state = self.state()
        padding = [torch.zeros_like(state)] * (each - len(self.values))
        return gathered(torch.stack([*self.values, *padding]))


def _floating_sums(metrics: Any, shared: list[Any]) -> Iterator[_FloatingSum]:
    """Yield the floating-point sums of a task's metrics."""
    if has_sums(metrics):
        for index, state in enumerate(metrics.sums()):
            if state.is_floating_point():
                yield _FloatingSum(metrics, index)
    for metric in shared:
        for name, reduction in metric._reductions.items():
            state = getattr(metric, name)
            is_sum = getattr(reduction, "__name__", "") == "dim_zero_sum"
            if is_sum and torch.is_tensor(state) and state.is_floating_point():
                yield _FloatingSum(metric, name)
