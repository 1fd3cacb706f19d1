"""The recipe: what is learned and how it runs, typed and frozen; read by :mod:`oneloop.parse`. Its groups that keep the books are in
:mod:`oneloop.bookkeeping`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from oneloop.bookkeeping import Debug, Eval, Log, Run, Save, Stop, Watch
from oneloop.duration import Duration
from oneloop.errors import BadInput, at_least


@dataclass(frozen=True)
class Task:
    name: str = "image_classification"
    """what is learned: image_classification, causal_lm, text_classification, or the class path of your own"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Init:
    source: str | None = None
    weights: str = "raw"
    """which weights of that run: raw, or the name of an average (ema)"""


@dataclass(frozen=True)
class Batch:
    size: int = 64
    """global batch: samples of one step over all processes"""
    micro: int | Literal["auto", "fastest"] | None = None
    """micro-batch: samples that one process puts through the model at once (null: batch.size / processes; auto: the
    largest that fits into memory, fastest: the quickest that fits, both tried before the run)"""

    def __post_init__(self) -> None:
        at_least(1, batch__size=self.size, batch__micro=self.micro if isinstance(self.micro, int) else 1)


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
    lr_at_batch: int = 0
    """global batch that optimizer.lr is meant for; at another one it is scaled by optimizer.lr_rule (0: no scaling)"""
    lr_rule: Literal["linear", "sqrt", "none"] = "sqrt"
    """how the learning rate grows with the batch: sqrt for Adam-like optimizers, linear for SGD"""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(0, optimizer__lr=self.lr, optimizer__weight_decay=self.weight_decay, optimizer__clip=self.clip,
                  optimizer__lr_at_batch=self.lr_at_batch)  # fmt: skip


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
        at_least(0, schedule__final=self.final)


@dataclass(frozen=True)
class Ema:
    half_life: Duration | list[Duration] = Duration(0)
    """samples or tokens (or steps, epochs) after which a weight counts half in the average (0: none; several: a list)"""
    decay: float = 0.0
    """a fixed share of the average kept per step, instead of a half-life (0: none)"""
    power: list[float] = field(default_factory=list)
    """widths of power-function averages, as shares of the run (0.05, 0.1); any other can be mixed after the run"""
    ramp: float = 0.05
    """the half-life is at most this share of what was trained so far (0: no ramp-up)"""
    every: int = 1
    """steps between two updates of the average; the half-life stays the same"""
    device: Literal["cpu"] | None = None
    """cpu keeps the averages in host memory (null: beside the weights)"""

    @property
    def half_lives(self) -> list[Duration]:
        several = self.half_life if isinstance(self.half_life, list) else [self.half_life]
        return [one for one in several if one.amount]

    def __post_init__(self) -> None:
        at_least(0, ema__decay=self.decay, ema__ramp=self.ramp)
        at_least(1, ema__every=self.every)
        if self.decay >= 1:
            raise BadInput(f"ema.decay must be below 1, got {self.decay}; 0.999 is usual")
        if self.decay and self.half_lives:
            raise BadInput(
                f"ema.half_life {self.half_life} and ema.decay {self.decay} are both given; give one of them"
            )


@dataclass(frozen=True)
class Guard:
    nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """a step whose loss or gradient is NaN or Inf: end the run with code 3; leave it out; or go back to the last
    checkpoint and pass over the samples since"""
    spike: Literal["stop", "skip", "rewind"] = "skip"
    """the same for a step whose loss or gradient norm is far above those before"""
    sigma: float = 0.0
    """how far: standard deviations above the mean of the window (0: nothing is a spike); 6 is usual"""
    window: int = 100
    """steps of the window"""
    patience: int = 10
    """bad steps in a row (rewinds without a checkpoint between them) that are borne before the run ends with code 3"""

    def __post_init__(self) -> None:
        at_least(0, guard__sigma=self.sigma, guard__patience=self.patience)
        at_least(2, guard__window=self.window)


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
    recompute: str = "none"
    """gradient checkpointing: none, full, every:K (each K-th block), selective (keep matmuls and attention), or
    budget:SHARE (with compile: keep that share of the activations)"""
    offload: bool = False
    """keep what recompute keeps in pinned host memory (needs a GPU, and recompute full or every:K)"""
    compile: Literal["none", "regional", "whole"] = "none"
    """torch.compile: block by block (quick to start), or the whole model"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    """torch.compile's mode"""
    blocks: list[str] = field(default_factory=list)
    """class names of the model's blocks, for recompute, compile and FSDP2 (empty: found by themselves)"""
    channels_last: bool | Literal["auto"] = "auto"
    """memory layout of convolutional models: channels last (auto: on a GPU)"""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """float32 products: highest is IEEE; high is TF32 (quicker on GPUs, and another split is then exact to 1e-3 only)"""
    cudnn_benchmark: bool = False
    """let cuDNN try its algorithms (quicker for one shape; a resume may choose others, and is then not exact to the bit)"""
    check_every: Duration = Duration(1000)
    """duration between two comparisons of weights and optimizer state over the processes (0: never)"""
    gc_every: Duration = Duration(1000)
    """duration between two garbage collections of Python, at the same step on all processes (0: Python's own)"""

    def __post_init__(self) -> None:
        at_least(0, machine__workers=0 if self.workers == "auto" else self.workers)


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
    ema: Ema
    guard: Guard
    eval: Eval
    save: Save
    stop: Stop
    log: Log
    watch: Watch
    machine: Machine
    run: Run
    debug: Debug
    resolved: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.run.dir or f"runs/{self.name}")

    def yaml(self) -> str:
        return yaml.safe_dump(dict(self.resolved), sort_keys=False)
