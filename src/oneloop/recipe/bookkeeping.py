"""Recipe keys that keep the books of a run: when it is evaluated, saved, stopped and logged, and where it lies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from oneloop.basics.duration import Duration, span
from oneloop.basics.errors import BadInput, at_least


@dataclass(frozen=True)
class EvalConfig:
    every: Duration = Duration("1ep")
    """duration between two evaluations (0: at the end only)"""
    micro: int | None = None
    """samples that one process evaluates at once (null: as in training)"""
    samples: int = 8
    """held-out samples to show after each evaluation, and as many with the largest loss (0: none)"""
    best: str = "eval/loss"
    """the metric that the best result, early stopping and the plateau schedule go by"""

    def __post_init__(self) -> None:
        at_least(1, eval__micro=1 if self.micro is None else self.micro)
        at_least(0, eval__samples=self.samples)


@dataclass(frozen=True)
class SaveConfig:
    every: Duration = Duration("10%")
    """duration between two checkpoints (0: at the end and at a stop only)"""
    keep: int = 2
    """newest checkpoints to keep"""
    forever: Duration = Duration(0)
    """checkpoints at multiples of this duration are kept for good (0: none)"""
    best: bool = True
    """also save whenever eval.best is better than ever, and keep that checkpoint"""
    final: Literal["last", "best"] = "last"
    """which weights final/ holds in the end: the last ones, or those of the best evaluation (needs save.best)"""
    sync: bool = False
    """write in the training process, which waits, instead of another one"""
    max_failures: int = 3
    """failing saves in a row (a full disk) before the run ends with exit code 1"""

    def __post_init__(self) -> None:
        at_least(1, save__keep=self.keep)
        if self.final == "best" and not self.best:
            raise BadInput("save.final best needs the checkpoint of the best evaluation; leave save.best at true")
        at_least(0, save__max_failures=self.max_failures)


@dataclass(frozen=True)
class StopConfig:
    patience: int = 0
    """evaluations without a better result before the run ends early (0: never)"""
    after: str | None = None
    """time after which the run saves and stops, to be started again: 55min, 3.5h, 90s (null: never)"""

    @property
    def seconds(self) -> float:
        """``after``, in seconds."""
        if self.after is None:
            return float("inf")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)", self.after)
        if match is None:
            raise BadInput(f"stop.after {self.after!r} is not a time; write 90s, 55min, 3.5h or 2d")
        return float(match[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[match[2]]

    def __post_init__(self) -> None:
        at_least(0, stop__patience=self.patience)
        assert self.seconds >= 0


@dataclass(frozen=True)
class LogConfig:
    every: Duration = Duration(50)
    """duration between two lines of metrics"""
    noise_scale: bool = True
    """measure the gradient noise scale on those steps: how large a batch is still worth its samples"""


@dataclass(frozen=True)
class WatchConfig:
    profile: str | None = None
    """steps to profile (10-15): a trace, and a table of the top operators, in the run folder's profile/"""
    memory: str | None = None
    """steps of which a snapshot of the GPU's memory is written (10-13)"""
    quiet: bool = False
    """show nothing but the end and what went wrong"""
    json: bool = False
    """show figures as JSON lines, as in metrics.jsonl, for other programs"""

    def __post_init__(self) -> None:
        for key, text in (("watch.profile", self.profile), ("watch.memory", self.memory)):
            if text is not None:
                try:
                    span(text, key)
                except ValueError as error:
                    raise BadInput(str(error)) from error


@dataclass(frozen=True)
class RunConfig:
    dir: str | None = None
    """the run's own folder (null: runs/<recipe>)"""
    resume: str = "auto"
    """auto: go on from the newest good checkpoint; never: refuse a folder with a run in it; or a checkpoint's path"""
    accept_changes: bool = False
    """go on although the recipe's mathematics has changed"""


@dataclass(frozen=True)
class DebugConfig:
    overfit: int = 0
    """train on that many samples only (0: on all)"""
    dry_run: bool = False
    """one step of the real shape, one evaluation, then stop"""

    def __post_init__(self) -> None:
        at_least(0, debug__overfit=self.overfit)
