"""All keys of a recipe, as typed, frozen dataclasses; :mod:`oneloop.recipe.parse` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from oneloop.basics.bucket import check_address, is_address
from oneloop.basics.duration import Duration, seconds, span
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import yaml_text

# The training configuration: keys that decide what is trained.


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


# Keys that do not change the trained model.


@dataclass(frozen=True)
class MachineConfig:
    device: Literal["auto", "cpu"] = "auto"
    """where to train: a GPU if torch finds one (auto), or the CPU in any case"""
    workers: int | Literal["auto"] = "auto"
    """data loading processes per training process (0: load in the training process)"""
    pinned: bool = True
    """GPU: keep batches in pinned host memory and copy them while the device computes"""
    dtype: Literal["float32", "float64"] = "float32"
    """dtype of the weights; float64 is for exact comparisons"""
    base_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """dtype of frozen matrices (null: unchanged): a 16-bit dtype with mixed precision, or
    float32"""
    deterministic: bool = False
    """use only deterministic algorithms; raise an error if an operation has none"""
    sync_each_batch: bool = False
    """FSDP2 with accumulation: reduce-scatter gradients after each micro-batch (less memory, more
    communication)"""
    find_unused_parameters: bool = False
    """DDP, FSDP2: find parameters without a gradient in each step (routing, adapters)"""
    recompute: str = "none"
    """activation (gradient) checkpointing: none, full, every:K (each K-th block), selective (keep
    matmuls, and attention without dropout), or budget:SHARE (with compile: keep that share of the
    activations)"""
    offload: bool = False
    """store the kept activations in pinned host memory (requires a GPU, and recompute full or
    every:K)"""
    compile: Literal["none", "regional", "whole"] = "none"
    """torch.compile: each block (starts faster), or the whole model"""
    compile_mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = "default"
    """mode of torch.compile"""
    blocks: list[str] = field(default_factory=list)
    """class names of the model's blocks, for recompute, compile and FSDP2 (empty: detect them)"""
    channels_last: bool | Literal["auto"] = "auto"
    """use the channels-last memory format for convolutional models (auto: on a GPU)"""
    matmul: Literal["highest", "high", "medium"] = "highest"
    """precision of float32 matmuls: highest is IEEE; high is TF32 (faster; layouts then differ by
    1e-3)"""
    cudnn_benchmark: bool = False
    """let cuDNN benchmark its algorithms (faster; a resume is then not bit-identical)"""
    check_every: Duration = Duration(1000)
    """duration between comparisons of all weights, buffers and optimizer state, and longest
    one between repeated micro-batches (0: none of these checks)"""
    patience: float = 1.0
    """factor of the time after which a process counts as hung, which ends the run (0: never)"""


@dataclass(frozen=True)
class EvalConfig:
    every: Duration = Duration("1ep")
    """duration between evaluations (0: only at the end)"""
    micro: int | None = None
    """micro-batch of the evaluation (null: as in training)"""
    samples: int = 8
    """number of validation samples to show after each evaluation, and of those with the largest
    loss (0: none)"""
    generate: int | Literal["all"] = 0
    """samples of each evaluated set for which the task generates, such as texts, for its metrics of
    what was generated: a number of evenly spread ones, or all (0: none)"""
    best: str = "eval/loss"
    """metric for the best checkpoint, early stopping and the plateau schedule; max:NAME or min:NAME
    says that larger or smaller is better, if the metric itself does not know"""

    @property
    def metric(self) -> str:
        """The name of the metric in ``best``."""
        return self.best.removeprefix("max:").removeprefix("min:")

    @property
    def larger_is_better(self) -> bool | None:
        """What ``best`` says about the metric; None: nothing."""
        if self.metric == self.best:
            return None
        return self.best.startswith("max:")


@dataclass(frozen=True)
class SaveConfig:
    every: Duration = Duration("10%")
    """duration between checkpoints, also as a time (20min; 0: only at the end and at a stop)"""
    keep: int = 2
    """number of newest checkpoints to keep"""
    forever: Duration = Duration(0)
    """never delete checkpoints at multiples of this duration (0: none)"""
    best: bool = True
    """save a checkpoint whenever eval.best improves, and keep the best one"""
    final: Literal["last", "best"] = "last"
    """weights to write to final/: the last, or the best by eval.best (requires save.best)"""
    mirror: str | None = None
    """address of a copy of the run in a bucket (s3://BUCKET/RUN, gs://…, file:///FOLDER/RUN; null:
    none)"""


@dataclass(frozen=True)
class StopConfig:
    patience: int = 0
    """early stopping: evaluations without improvement before the run ends (0: never)"""
    after: str | None = None
    """time limit: save and stop after it; the same command resumes (55min, 3.5h, 90s; null: no
    limit)"""

    @property
    def seconds(self) -> float:
        """``after`` in seconds; infinite without a limit. Raise BadInput if it is not a time."""
        return float("inf") if self.after is None else seconds(self.after, "stop.after")

    def __post_init__(self) -> None:
        assert self.seconds >= 0


@dataclass(frozen=True)
class LogConfig:
    every: Duration | Literal["auto"] = "auto"
    """duration between log lines (auto: 50 steps; in a run of less than 2,000 steps fewer, for at
    least 40 lines)"""


@dataclass(frozen=True)
class WatchConfig:
    profile: str | None = None
    """steps to profile (10-15): writes a trace and a table of operators to profile/ in the run
    folder"""
    memory: str | None = None
    """steps to record in a GPU memory snapshot (10-13)"""
    output: Literal["progress", "quiet", "json"] = "progress"
    """progress: bars on a terminal, else lines; quiet: only errors and the end of the run; json:
    metrics as JSON lines, as in metrics.jsonl"""

    def __post_init__(self) -> None:
        for key, text in (("watch.profile", self.profile), ("watch.memory", self.memory)):
            if text is not None:
                span(text, key)


@dataclass(frozen=True)
class RunConfig:
    dir: str | None = None
    """run folder (null: runs/<recipe>), or an address: the mirror of a scratch folder
    runs/BUCKET/RUN"""
    resume: str = "auto"
    """auto: resume from the newest intact checkpoint; never: reject a folder that has a run; or a
    checkpoint's path"""
    accept_changes: bool = False
    """resume although the training configuration, data or model has changed"""


@dataclass(frozen=True)
class DebugConfig:
    overfit: int = 0
    """train on only this many samples (0: all)"""
    dry_run: bool = False
    """run one step with the real shapes, one evaluation and one save, then stop"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A resolved recipe; ``resolved`` holds the same keys as plain data, as in recipe.yaml."""

    name: str
    seed: int = 0
    """seed of everything random"""
    duration: Duration = Duration("10ep")
    """length of training: steps (500), '20ep', '1M samples', '2B tokens'"""
    track: list[str] = field(default_factory=lambda: ["tensorboard"])
    """trackers by accelerate's names, comma-separated: tensorboard, wandb, trackio, mlflow, …
    ('none': none)"""
    task: TaskConfig
    init: InitConfig
    data: DataConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    ema: EmaConfig
    guard: GuardConfig
    eval: EvalConfig
    save: SaveConfig
    stop: StopConfig
    log: LogConfig
    watch: WatchConfig
    machine: MachineConfig
    run: RunConfig
    debug: DebugConfig
    resolved: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.mirror is None:
            return
        key = "run.dir" if self.mirror == self.run.dir else "save.mirror"
        check_address(self.mirror, key)

        # A mirror in a folder of this machine is not the run folder.
        there = Path(self.mirror.removeprefix("file://")).resolve()
        here = self.folder.resolve()
        are_nested = there.is_relative_to(here) or here.is_relative_to(there)
        if are_nested and self.mirror.startswith("file:"):
            raise BadInput(
                f"save.mirror {self.mirror} and run.dir {self.folder} are inside each other, and "
                "files of one would be deleted with the other; choose another address"
            )

    @property
    def folder(self) -> Path:
        """Return the run folder on this host."""
        if is_address(self.run.dir):
            return Path("runs", str(self.run.dir).partition("://")[2].strip("/"))
        return Path(self.run.dir or f"runs/{self.name}").expanduser()

    @property
    def mirror(self) -> str | None:
        """Return the address of the mirror, if there is one."""
        return self.run.dir if is_address(self.run.dir) else self.save.mirror

    def yaml(self) -> str:
        """Return the content of recipe.yaml."""
        return yaml_text(self.resolved)


_GROUPS = [one for one in fields(Recipe) if is_dataclass(one.type)]
GROUPS: dict[str, Any] = {one.name: one.type for one in _GROUPS}
"""the groups of keys and their classes, as ``--help`` lists them"""
