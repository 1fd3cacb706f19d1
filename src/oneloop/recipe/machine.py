"""Recipe keys that say how a run is computed: they change nothing of its result beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from oneloop.basics.duration import Duration
from oneloop.basics.errors import within


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
    """DDP, FSDP2: in every step, search for parameters that took no part in the loss (routing, adapters)"""
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
