"""The counters of a run, and its log: each line starts with the counters."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from oneloop.show.examples import Examples
from oneloop.show.terminal import Display
from oneloop.show.tracking import Tracking


@dataclass
class Counters:
    """One counter, one meaning. ``position`` and ``samples`` part only by steps that were not taken."""

    position: int = 0  # samples drawn from the order, skipped steps included; drives which samples come next
    step: int = 0  # optimizer updates done
    samples: int = 0  # samples trained on
    weight: float = 0.0  # summed weight trained on: samples, or target tokens for text
    reductions: int = 0  # times that the plateau schedule lowered the learning rate
    waited: int = 0  # evaluations since the best one or the last reduction
    seconds: float = 0.0  # spent on the run by earlier starts
    evaluation_due: bool = False  # a stop came before the evaluation of this step was done

    @property
    def passed_over(self) -> int:
        """Samples drawn but not trained on: of bad steps that the policy leaves out, and of fp16 loss scaling."""
        return self.position - self.samples

    def begin(self) -> None:
        """The clock of :meth:`elapsed` goes on from here; a rewind does not turn it back."""
        self._began = time.perf_counter() - self.seconds

    def elapsed(self) -> float:
        """Seconds spent on the run, over all starts."""
        return time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.elapsed()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def trained(self, samples: int, weight: float) -> None:
        """One update was made with ``samples`` samples of this summed weight."""
        self.step += 1
        self.samples += samples
        self.weight += weight

    def evaluated(self, better: bool, *, patience: int) -> None:
        """An evaluation was made; after ``patience`` of them without a better one the plateau schedule steps down."""
        self.waited = 0 if better else self.waited + 1
        if patience and self.waited >= patience:
            self.reductions += 1
            self.waited = 0

    def as_metrics(self, unit: str) -> dict[str, int]:
        """What stands at the head of every line of metrics."""
        tokens = {"tokens": int(self.weight)} if unit == "tokens" else {}
        return {"step": self.step, "samples": self.samples, **tokens}


class Results(dict[str, float]):
    """The latest metric of each kind; those of an average are headed by its name."""

    def take(self, metrics: Mapping[str, float], weights: str) -> None:
        """Takes in the evaluation of these weights (``raw``, or an average's name)."""
        self.update(metrics if weights == "raw" else {f"{weights}/{name}": value for name, value in metrics.items()})

    def __missing__(self, name: str) -> float:
        raise ValueError(f"eval.best {name!r} is not a metric of the evaluation; it has {', '.join(self)}")

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


@dataclass
class Best:
    """The best evaluation so far, and how many have passed since."""

    value: float | None = None
    step: int = 0
    since: int = 0  # evaluations since the best one

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def update(self, value: float, step: int, *, higher_is_better: bool) -> bool:
        """Take one result; True where it is the best so far. NaN never is."""
        better = value == value and (
            self.value is None or (value > self.value if higher_is_better else value < self.value)
        )
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better


class RunLog:
    """Lines for metrics.jsonl, the trackers and the terminal; ``unit`` is what the weight counts, samples or tokens.
    ``resumed`` is whether the run continues a checkpoint of its own folder."""

    def __init__(
        self,
        count: Counters,
        results: Results,
        tracking: Tracking,
        display: Display,
        *,
        unit: str = "samples",
        resumed: bool = False,
    ) -> None:
        self._count, self._results, self._tracking, self._display = count, results, tracking, display
        self._unit, self.resumed = unit, resumed

    def line(self, **metrics: Any) -> dict[str, Any]:
        """These metrics, headed by the counters; what is given here again takes the counter's place."""
        return {**self._count.as_metrics(self._unit), **metrics}

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes a line down."""
        self._tracking.log(line)

    def event(self, name: str) -> None:
        """Writes down that something happened."""
        self.write(self.line(event=name))

    def log(self, metrics: Mapping[str, float], remarks: Iterable[str], **more: str) -> None:
        """Training metrics, and what there is to say of them; ``more`` is written down only."""
        self._results["train/loss"] = metrics["train/loss"]
        self.write(self.line(time=self._count.elapsed(), **metrics, **more))
        self._display.metrics(self._count.step, metrics, remarks)

    def evaluated(
        self, by_weights: Mapping[str, Mapping[str, float]], examples: Examples | None = None, *, of: int | None = None
    ) -> None:
        """The results of an evaluation by the weights that were evaluated (``raw``, an average's name). At the end they
        may be ``of`` an earlier step, the best: what was written down then is not written again."""
        step = self._count.step if of is None else of
        if examples is not None:
            self._tracking.show(step, examples)
        for weights, metrics in by_weights.items():
            self._results.take(metrics, weights)
            new = {name: value for name, value in metrics.items() if of is None or name.startswith("test/")}
            if new:
                self.write(self.line(step=step, **new, weights=weights))
            self._display.results(step, metrics, weights)
