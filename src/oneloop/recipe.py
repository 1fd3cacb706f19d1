"""The recipe: what is learned and how it runs, typed and frozen; read by :mod:`oneloop.parse`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from oneloop.duration import Duration
from oneloop.errors import BadInput


def _at_least(bound: float, **values: float) -> None:
    for key, value in values.items():
        if not value >= bound:
            raise BadInput(f"{key.replace('__', '.')} must be at least {bound}, got {value}")


@dataclass(frozen=True)
class Task:
    name: str = "image_classification"
    """what is learned: image_classification, causal_lm, text_classification, or the class path of your own"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Init:
    source: str | None = None
    weights: Literal["raw"] = "raw"
    """which weights of that run"""


@dataclass(frozen=True)
class Batch:
    size: int = 64
    """global batch: samples of one step over all processes"""
    micro: int | None = None
    """micro-batch: samples that one process puts through the model at once (null: batch.size / processes)"""

    def __post_init__(self) -> None:
        _at_least(1, batch__size=self.size, batch__micro=1 if self.micro is None else self.micro)


@dataclass(frozen=True)
class Optimizer:
    name: str = "adamw"
    """adamw, sgd, muon, adafactor, or the class path of a torch.optim.Optimizer"""
    lr: float = 1e-3
    """peak learning rate"""
    weight_decay: float = 0.0
    """weight decay of matrices; vectors (biases, norms) have none"""
    clip: float = 1.0
    """largest global gradient norm (0: no clipping)"""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(0, optimizer__lr=self.lr, optimizer__weight_decay=self.weight_decay, optimizer__clip=self.clip)


@dataclass(frozen=True)
class Schedule:
    name: str = "constant"
    """constant, linear, cosine, wsd, plateau, or the path of a function (step, total) -> factor of the peak rate"""
    warmup: Duration = Duration(0)
    """duration of the linear warm-up (5%, 1ep, 100, '10K samples')"""
    final: float = 0.0
    """learning rate at the end, as a share of the peak"""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(0, schedule__final=self.final)


@dataclass(frozen=True)
class Eval:
    every: Duration = Duration("1ep")
    """duration between two evaluations (0: at the end only)"""
    micro: int | None = None
    """samples that one process evaluates at once (null: as in training)"""
    best: str = "eval/loss"
    """the metric that the best result, early stopping and the plateau schedule go by"""

    def __post_init__(self) -> None:
        _at_least(1, eval__micro=1 if self.micro is None else self.micro)


@dataclass(frozen=True)
class Save:
    every: Duration = Duration("10%")
    """duration between two checkpoints (0: at the end and at a stop only)"""
    keep: int = 2
    """newest checkpoints to keep"""
    forever: Duration = Duration(0)
    """checkpoints at multiples of this duration are kept for good (0: none)"""
    best: bool = True
    """also save whenever eval.best is better than ever, and keep that checkpoint"""
    sync: bool = False
    """write in the training process, which waits, instead of another one"""
    max_failures: int = 3
    """failing saves in a row that are borne (a full disk) before the run ends with exit code 1"""

    def __post_init__(self) -> None:
        _at_least(1, save__keep=self.keep)
        _at_least(0, save__max_failures=self.max_failures)


@dataclass(frozen=True)
class Stop:
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
        _at_least(0, stop__patience=self.patience)
        assert self.seconds >= 0


@dataclass(frozen=True)
class Log:
    every: Duration = Duration(10)
    """duration between two lines of metrics"""


@dataclass(frozen=True)
class Machine:
    workers: int | Literal["auto"] = "auto"
    """processes that load data, for each training process (0: load in the training process)"""
    dtype: Literal["float32", "float64"] = "float32"
    """type of the weights; float64 is for proofs"""
    deterministic: bool = False
    """use only deterministic algorithms, and fail where an operation has none"""
    sync_each_batch: bool = False
    """FSDP2 with accumulation: scatter gradients at every micro-batch, for less memory and more communication"""

    def __post_init__(self) -> None:
        _at_least(0, machine__workers=0 if self.workers == "auto" else self.workers)


@dataclass(frozen=True)
class Run:
    dir: str | None = None
    """the run's own folder (null: runs/<recipe>)"""
    resume: str = "auto"
    """auto: go on from the newest good checkpoint; never: refuse a folder with a run in it; or a checkpoint's path"""
    accept_changes: bool = False
    """go on although the recipe's mathematics has changed"""


@dataclass(frozen=True)
class Debug:
    overfit: int = 0
    """train on that many samples only (0: on all)"""
    dry_run: bool = False
    """one step of the real shape, one evaluation, then stop"""

    def __post_init__(self) -> None:
        _at_least(0, debug__overfit=self.overfit)


@dataclass(frozen=True)
class Recipe:
    """A resolved recipe; ``resolved`` is the same as plain data, as written to recipe.yaml."""

    name: str
    seed: int
    duration: Duration
    track: tuple[str, ...]
    task: Task
    init: Init
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule
    eval: Eval
    save: Save
    stop: Stop
    log: Log
    machine: Machine
    run: Run
    debug: Debug
    resolved: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.run.dir or f"runs/{self.name}")

    def yaml(self) -> str:
        return yaml.safe_dump(dict(self.resolved), sort_keys=False)
