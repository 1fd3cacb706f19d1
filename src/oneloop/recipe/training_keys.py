"""Recipe keys that say what is learned: the task, the batch, the optimizer, the schedule, averages and bad steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput, at_least, within


@dataclass(frozen=True)
class TaskConfig:
    name: str = "image_classification"
    """what is learned: image_classification, causal_lm, text_classification, text_regression, token_classification, or
    the class path of your own"""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class InitConfig:
    source: str | None = None
    weights: str = "raw"
    """which weights of that run: raw, or the name of an average (ema)"""
    leave_out: list[str] = field(default_factory=list)
    """patterns of parameters that are not taken from there: they begin as the task makes them (head, "*.bias")"""


@dataclass(frozen=True)
class BatchConfig:
    size: int = 64
    """global batch: samples of one step over all processes"""
    micro: int | Literal["auto", "fastest"] | None = None
    """micro-batch: samples that one process puts through the model at once (null: batch.size / processes; auto: the
    largest that fits into memory, fastest: the quickest that fits, both tried before the run)"""
    grain: int | None = None
    """samples of a leaf: what goes through the model at once everywhere, so that the weights are the same bits for any
    number of processes, sharded or not (null: equal to rounding). batch.size / grain and the processes are powers of
    two"""

    def __post_init__(self) -> None:
        at_least(1, batch__size=self.size, batch__micro=self.micro if isinstance(self.micro, int) else 1)
        if self.grain is not None:
            at_least(1, batch__grain=self.grain)
            self._reject_grain(self.grain)

    def _reject_grain(self, grain: int) -> None:
        leaves, rest = divmod(self.size, grain)
        if rest or leaves & (leaves - 1) or not leaves:
            powers = [grain << power for power in range(self.size.bit_length() + 1)]
            nearest = min(powers, key=lambda size: abs(size - self.size))
            why = f"batch.size {self.size} is {self.size / grain:.4g} times batch.grain {grain}"
            raise BadInput(f"{why}, and batch.grain requires a power of two; nearest size: {nearest}")
        if self.micro not in (None, grain):
            raise BadInput(f"batch.micro {self.micro} cannot be combined with batch.grain {grain}; remove batch.micro")


@dataclass(frozen=True)
class ParametersConfig:
    """What is set for the parameters that a pattern takes."""

    freeze: bool | None = None
    """they keep their values: no gradient, no optimizer state, no average"""
    lr_factor: float | None = None
    """their share of the learning rate"""
    weight_decay: float | None = None
    """of vectors too"""

    def __post_init__(self) -> None:
        if not self.settings:
            raise BadInput("optimizer.groups: a pattern without a setting; give freeze, lr_factor or weight_decay")
        at_least(
            0, optimizer__groups__lr_factor=self.lr_factor or 0, optimizer__groups__weight_decay=self.weight_decay or 0
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Those that are given."""
        return {key: value for key, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class OptimizerConfig:
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
    groups: dict[str, ParametersConfig] = field(default_factory=dict)
    """freeze, lr_factor and weight_decay by pattern: {backbone: {lr_factor: 0.1}, '*.bias': {weight_decay: 0},
    'encoder.[0-5]': {freeze: true}}. A pattern is a parameter's dotted name or the beginning of one, where * stands
    for anything, ? for one character and [0-5] for one of several"""
    layer_decay: float = 1.0
    """factor of the learning rate from one block of the model to the one below it (1: the same for all)"""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        at_least(0, optimizer__lr=self.lr, optimizer__weight_decay=self.weight_decay)
        at_least(0, optimizer__clip=self.clip, optimizer__lr_at_batch=self.lr_at_batch)
        built = {k: ParametersConfig(**v) if isinstance(v, Mapping) else v for k, v in self.groups.items()}
        object.__setattr__(self, "groups", built)  # the parser leaves them plain
        if not 0 < self.layer_decay <= 1:
            raise BadInput(f"optimizer.layer_decay must be above 0 and at most 1, got {self.layer_decay}")


@dataclass(frozen=True)
class ScheduleConfig:
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
class EmaConfig:
    half_life: Duration | list[Duration] = Duration(0)
    """samples (or tokens, steps, epochs) after which a weight counts half in the average (0: none; several: a list)"""
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
        return [half_life for half_life in several if half_life.amount]

    def __post_init__(self) -> None:
        at_least(0, ema__decay=self.decay, ema__ramp=self.ramp)
        at_least(1, ema__every=self.every)
        if not (self.decay or self.half_lives or self.power) and (self.every != 1 or self.ramp != 0.05):
            key = "every" if self.every != 1 else "ramp"
            why = f"ema.{key} {getattr(self, key)} has no effect without EMA weights"
            raise BadInput(f"{why}; set ema.half_life, ema.decay or ema.power, or remove ema.{key}")
        if self.decay >= 1:
            raise BadInput(f"ema.decay must be below 1, got {self.decay}; 0.999 is common")
        if self.decay and self.half_lives:
            raise BadInput(f"ema.half_life {self.half_life} and ema.decay {self.decay} are both set; set one of them")


@dataclass(frozen=True)
class GuardConfig:
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
    """bad steps in a row (rewinds without a checkpoint between them) before the run ends with code 3"""

    def __post_init__(self) -> None:
        at_least(0, guard__sigma=self.sigma)
        at_least(1, guard__patience=self.patience)
        within(2, 100_000, guard__window=self.window)
