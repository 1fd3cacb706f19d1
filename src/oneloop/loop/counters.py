"""The counters of a run, and its log, in which each line starts with the counters."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from oneloop.measure.meter import OWN_METRICS
from oneloop.show.examples import Examples
from oneloop.show.terminal import Display
from oneloop.show.tracking import Tracking


@dataclass
class Counters:
    """Counters of a run.

    ``position`` and ``samples`` differ only by the samples of steps that were not accepted.
    """

    position: int = 0  # samples drawn from the order, with skipped steps; decides the next samples
    step: int = 0  # optimizer updates done
    samples: int = 0  # samples trained on
    weight: float = 0.0  # summed weight trained on: samples, or target tokens for text
    reductions: int = 0  # times that the plateau schedule lowered the learning rate
    waited: int = 0  # evaluations since the best result or the last reduction
    seconds: float = 0.0  # time spent by earlier starts
    evaluation_due: bool = False  # a stop came before the evaluation of this step was done

    @property
    def passed_over(self) -> int:
        """Samples drawn but not trained on, because of bad steps or fp16 loss scaling."""
        return self.position - self.samples

    def begin(self) -> None:
        """Start the clock of :meth:`elapsed`, which a rewind does not reset."""
        self._began = time.perf_counter() - self.seconds

    def elapsed(self) -> float:
        """Return the seconds spent on the run, over all starts."""
        return time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for known in fields(self):
            kind = type(getattr(self, known.name))
            setattr(self, known.name, kind(state[known.name]))

    def trained(self, samples: int, weight: float) -> None:
        """Count an accepted update with ``samples`` samples of total weight ``weight``."""
        self.step += 1
        self.samples += samples
        self.weight += weight

    def evaluated(self, better: bool, *, patience: int) -> None:
        """Count an evaluation, which may make the plateau schedule reduce the learning rate.

        Args:
            better: whether it is the best so far.
            patience: evaluations without improvement before a reduction (0: no reductions).
        """
        self.waited += 1
        if better:
            self.waited = 0
        if patience and self.waited >= patience:
            self.reductions += 1
            self.waited = 0

    def as_metrics(self, unit: str) -> dict[str, int]:
        """Return the counters for the start of a log line."""
        metrics = {"step": self.step, "samples": self.samples}
        if unit == "tokens":
            metrics["tokens"] = int(self.weight)
        return metrics


class Results(dict[str, float]):
    """The latest value of each metric.

    Metrics of EMA weights are prefixed with the name of the EMA.
    """

    def take(self, metrics: Mapping[str, float], weights: str) -> None:
        """Store the metrics of an evaluation of ``weights`` (``raw``, or the name of an EMA)."""
        prefix = "" if weights == "raw" else f"{weights}/"
        for name, value in metrics.items():
            self[prefix + name] = value

    def __missing__(self, name: str) -> float:
        raise ValueError(
            f"eval.best {name!r} is not a metric of the evaluation; it has {', '.join(self)}"
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update({name: float(value) for name, value in state.items()})


@dataclass
class Best:
    """The best evaluation so far, and the number of evaluations since."""

    metric: str = ""
    upward: bool = False  # whether a larger value is better
    value: float | None = None
    step: int = 0
    since: int = 0  # evaluations since the best one

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # The best of another metric or direction is none.
        if state["metric"] == self.metric and state["upward"] == self.upward:
            value = state["value"]
            self.value = None if value is None else float(value)
            self.step = int(state["step"])
            self.since = int(state["since"])

    def update(self, value: float, step: int) -> bool:
        """Compare the result of an evaluation with the best one so far.

        Args:
            value: the metric.
            step: that was evaluated.

        Returns:
            Whether it is the best so far, which NaN never is.
        """
        # The first result is the best so far.
        if math.isnan(value):
            better = False
        elif self.value is None:
            better = True
        elif self.upward:
            better = value > self.value
        else:
            better = value < self.value

        if better:
            self.value = value
            self.step = step
            self.since = 0
        else:
            self.since += 1
        return better


class RunLog:
    """Writes metrics.jsonl, the trackers and the terminal.

    Args:
        count: the counters, with which each line starts.
        results: gets the latest metrics.
        tracking: metrics.jsonl and the trackers.
        display: the terminal.
        unit: what the weight counts: samples or tokens.
        resumed: whether the run continues from a checkpoint of its own folder.
        before: called before each line; it may raise an error.
    """

    def __init__(
        self,
        count: Counters,
        results: Results,
        tracking: Tracking,
        display: Display,
        *,
        unit: str = "samples",
        resumed: bool = False,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        self._before = before
        self._count = count
        self._results = results
        self._tracking = tracking
        self._display = display
        self._unit = unit
        self.resumed = resumed

    def line(self, **metrics: Any) -> dict[str, Any]:
        """Return a line: the counters, then these metrics, which may override counters."""
        return {**self._count.as_metrics(self._unit), **metrics}

    def write(self, line: Mapping[str, Any]) -> None:
        """Log a line to metrics.jsonl and the trackers."""
        self._before()
        self._tracking.log(line)

    def event(self, name: str) -> None:
        """Log an event, for example ``save``."""
        self.write(self.line(event=name))

    def log(self, metrics: Mapping[str, float], **more: str) -> None:
        """Log training metrics, and print them.

        Args:
            metrics: by name.
            more: only logged.
        """
        self._results["train/loss"] = metrics["train/loss"]
        self.write(self.line(time=self._count.elapsed(), **metrics, **more))
        named = [name for name in metrics if name.startswith("train/") and name not in OWN_METRICS]
        self._display.metrics(self._count.step, metrics, named)

    def evaluated(
        self,
        by_weights: Mapping[str, Mapping[str, float]],
        examples: Examples | None = None,
        *,
        of: int | None = None,
    ) -> None:
        """Log the results of an evaluation.

        Args:
            by_weights: metrics by weights (``raw``, or the name of an EMA).
            examples: predictions for the trackers.
            of: the earlier step, the best one, that the weights are from. Then only test metrics
                are logged: the others were logged at that step.
        """
        step = self._count.step if of is None else of
        if examples is not None:
            self._tracking.show(step, examples)

        for weights, metrics in by_weights.items():
            self._results.take(metrics, weights)
            new = {n: v for n, v in metrics.items() if of is None or n.startswith("test/")}
            if new:
                self.write({**self.line(step=step), **new, "weights": weights})
            self._display.results(step, metrics, weights)
