"""Keys that do not change the trained model.

They are for the machine, evaluation, saving, logging and the run folder.
"""

from dataclasses import dataclass, field
from typing import Literal

from oneloop.basics.duration import Duration, seconds, span


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
