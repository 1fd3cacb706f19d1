"""The counters of a run with its latest metrics, and its best evaluation."""

import math
import time
from dataclasses import asdict, dataclass, field, fields
from typing import Any


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
    seconds: float = 0.0  # time spent by earlier starts
    evaluation_due: bool = False  # a stop came before the evaluation of this step was done
    # the latest value of each metric; those of EMA weights are prefixed with the name of the EMA
    results: dict[str, float] = field(default_factory=dict)

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

    def evaluated(self, since: int, *, patience: int) -> None:
        """Let the plateau schedule reduce the learning rate, if an evaluation makes it due.

        Args:
            since: evaluations since the best one.
            patience: evaluations without improvement before a reduction (0: no reductions).
        """
        if since and patience and since % patience == 0:
            self.reductions += 1

    def as_metrics(self, unit: str) -> dict[str, int]:
        """Return the counters for the start of a log line."""
        metrics = {"step": self.step, "samples": self.samples}
        if unit == "tokens":
            metrics["tokens"] = int(self.weight)
        return metrics


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
        sign = 1 if self.upward else -1
        first = self.value is None and not math.isnan(value)
        better = first or (self.value is not None and sign * value > sign * self.value)
        if better:
            self.value = value
            self.step = step
            self.since = 0
        else:
            self.since += 1
        return better
