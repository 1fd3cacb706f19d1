"""The keys of a recipe that leave the trained model as it is: machine, log, save, run and watch."""

import re
from dataclasses import dataclass, field
from typing import Literal

from oneloop.basics.duration import Duration, span
from oneloop.basics.exit_codes import BadInput, at_least, within


@dataclass(frozen=True)
class MachineConfig:
    workers: int | Literal["auto"] = "auto"
    """processes that load data, for each training process (0: load in the training process)"""
    pinned: bool = True
    """on a GPU: batches wait in pinned host memory, and are copied while the device computes"""
    dtype: Literal["float32", "float64"] = "float32"
    """type of the weights; float64 is for proofs"""
    base_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """type of frozen matrices (null: their own): a half one, with mixed precision, or float32 for what is in half"""
    quant_storage: Literal["auto", "uint8", "bfloat16", "float16", "float32"] = "auto"
    """type that holds the bytes of matrices in 4 bits; FSDP2 shards floating ones only (auto: what fits)"""
    deterministic: bool = False
    """use only deterministic algorithms, and fail where an operation has none"""
    sync_each_batch: bool = False
    """FSDP2 with accumulation: scatter gradients at every micro-batch, for less memory and more communication"""
    find_unused_parameters: bool = False
    """DDP, FSDP2: in every step, search for parameters without a gradient (routing, adapters)"""
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
    """float32 products: highest is IEEE; high is TF32 (quicker on GPUs; another split is then exact to 1e-3 only)"""
    cudnn_benchmark: bool = False
    """let cuDNN try its algorithms (quicker for one shape; a resume may choose others, and is then not exact)"""
    in_turn: bool = False
    """the processes of a host make their models one after another: one copy at a time in its memory, a slower start"""
    check_every: Duration = Duration(1000)
    """duration between two comparisons of weights and optimizer state over the processes (0: never)"""
    patience: float = 1.0
    """factor of the time after which a process that gives no sign of life is named, and ends the run (0: never)"""
    gc_every: Duration = Duration(1000)
    """duration between two garbage collections of Python, at the same step on all processes (0: Python's own)"""

    def __post_init__(self) -> None:
        within(0, 512, machine__workers=0 if self.workers == "auto" else self.workers)
        within(0, 1e6, machine__patience=self.patience)


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
            raise BadInput("save.final best needs the checkpoint of the best evaluation; keep save.best true")
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
    """show metrics as JSON lines, as in metrics.jsonl, for other programs"""

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
    """auto: go on from the newest good checkpoint; never: reject a folder with a run in it; or a checkpoint's path"""
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
