"""The training configuration: keys that decide what is trained.

They are for task, batch, optimizer, schedule, EMA and bad steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput


@dataclass(frozen=True)
class TaskConfig:
    name: str = "image_classification"
    """task to train: image_classification, causal_lm, masked_lm, sft, preference, reward,
    distil, seq2seq, text_classification, text_regression, token_classification, text_pairs, or the
    class path of
    your own task"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InitConfig:
    source: str | None = None
    weights: str = "raw"
    """weights of that run to start from: raw, or the name of an EMA (ema)"""
    leave_out: list[str] = field(default_factory=list)
    """patterns of parameters that keep their initial values from the task (head, "*.bias")"""


@dataclass(frozen=True)
class DataConfig:
    shuffle: bool = True
    """shuffle the training samples in each epoch (false: in the order of the files; a mixture keeps
    its shares, and packed rows come by their first document)"""


@dataclass(frozen=True)
class BatchConfig:
    size: int = 64
    """global batch: samples of one step over all processes"""
    micro: int | Literal["auto", "fastest"] | None = None
    """micro-batch: samples per process in one forward pass (null: batch.size / processes; auto:
    search for the largest that fits into memory; fastest: search for the fastest that fits)"""
    grain: int | None = None
    """grain: a micro-batch size that is the same on any number of processes, for bit-identical
    weights, sharded or not (null: equal up to rounding). batch.size / batch.grain and the number of
    processes must be powers of two"""


@dataclass(frozen=True)
class ParametersConfig:
    """Settings for the parameters that match a pattern."""

    freeze: bool | None = None
    """keep the initial values: no gradient, optimizer state or EMA"""
    lr_factor: float | None = None
    """factor of the learning rate"""
    weight_decay: float | None = None
    """weight decay, also of vectors"""

    def __post_init__(self) -> None:
        if not self.settings:
            raise BadInput(
                "optimizer.groups: a pattern without a setting; give freeze, lr_factor or "
                "weight_decay"
            )
        for key, value in self.settings.items():
            if value < 0:
                raise BadInput(f"optimizer.groups: {key} must be at least 0, got {value}")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"
    """adamw, sgd, muon, or the class path of a torch.optim.Optimizer"""
    lr: float = 1e-3
    """peak learning rate"""
    weight_decay: float = 0.0
    """weight decay of matrices; vectors (biases, norms) have no weight decay"""
    clip: float = 1.0
    """maximum global gradient norm (0: no clipping)"""
    lr_at_batch: int = 0
    """global batch size that optimizer.lr is for; for batch.size, the rate is scaled linearly with
    sgd and torch.optim.SGD, else by the square root (0: no scaling)"""
    groups: dict[str, ParametersConfig] = field(default_factory=dict)
    """freeze, lr_factor and weight_decay by pattern: {backbone: {lr_factor: 0.1}, '*.bias':
    {weight_decay: 0}, 'encoder.[0-5]': {freeze: true}}. A pattern is a parameter's dotted name or
    the start of one; * matches any text, ? one character and [0-5] one of several. The pattern *
    gives defaults, which any other pattern overrides"""
    layer_decay: float = 1.0
    """factor of the learning rate from each block of the model to the block below it (1: no
    decay)"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = "constant"
    """constant, linear, cosine, wsd, plateau, the class path of a scheduler of torch
    (torch.optim.lr_scheduler.OneCycleLR) or transformers, or the path of a function
    (step, total) -> factor of the peak rate"""
    warmup: Duration = Duration(0)
    """duration of the linear warm-up (5%, 1ep, 100, '10K samples')"""
    warmup_start: float | None = None
    """learning rate at the first step of the warm-up, as a share of the peak (transformers: 0;
    null: 1 / warm-up steps)"""
    warmup_offset: int = 0
    """steps that are added to the divisor of the warm-up, whose rate is peak * (step + 1) /
    divisor (nanoGPT: 1)"""
    length: Duration | None = None
    """duration of the schedule, warm-up included; then the rate stays at its last value (null: the
    run)"""
    final: float = 0.0
    """learning rate at the end, as a share of the peak"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EmaConfig:
    half_life: Duration | list[Duration] = Duration(0)
    """duration after which the contribution of a weight has halved; at most 5% of the training so
    far (0: no EMA; a list: several EMAs)"""
    decay: float = 0.0
    """decay factor per step, instead of a half-life (0: none)"""
    power: list[float] = field(default_factory=list)
    """widths of power-function EMAs as shares of the run (0.05, 0.1); oneloop export can mix other
    widths later"""
    start: Duration | None = None
    """duration until which the EMA is a copy of the weights, with ema.decay (0: the first step;
    null: the EMA starts from the initial weights)"""
    warmup_power: float = 0.0
    """exponent of a warm-up of ema.decay, which is at most 1 - (1 + n) ** -power n steps after the
    first or ema.start (timm, ema-pytorch, diffusers: 0.6666666666666666; 0: none)"""
    buffers: bool = False
    """also average floating-point buffers, such as BatchNorm statistics (timm, torchvision:
    true)"""
    every: int = 1
    """steps between two updates of the EMA; the half-life stays the same"""
    device: Literal["cpu"] | None = None
    """cpu keeps EMA weights in host memory (null: on the device)"""

    @property
    def half_lives(self) -> list[Duration]:
        several = self.half_life if isinstance(self.half_life, list) else [self.half_life]
        return [half_life for half_life in several if half_life.amount]


@dataclass(frozen=True)
class GuardConfig:
    nonfinite: Literal["stop", "skip", "rewind"] = "stop"
    """action if the loss or gradient is NaN or Inf: stop the run with exit code 3; skip the step;
    or rewind to the last checkpoint and skip the samples since then"""
    sigma: float = 0.0
    """threshold of a spike of loss or gradient norm, whose step is skipped: standard deviations
    above the mean of the last 100 steps (0: off; common: 6)"""
    patience: int = 10
    """bad steps in a row (or rewinds without a new checkpoint) before the run ends with exit code
    3"""
