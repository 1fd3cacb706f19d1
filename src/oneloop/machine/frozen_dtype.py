"""The dtypes of frozen parameters."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from oneloop.machine.mixed_precision import HALF


def hold_frozen(model: nn.Module, dtype: str | None, *, sharded: bool) -> None:
    """Convert frozen parameters in place to their dtypes for the run.

    Args:
        model: not yet wrapped or sharded.
        dtype: of matrices, not norms and biases (None: unchanged).
        sharded: whether FSDP2 will shard the model.

    Raises:
        ValueError: nothing is frozen, or compute dtypes are mixed.
    """
    # Products need one dtype, which autocast gives them.
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if dtype is not None and not frozen:
        raise ValueError(
            f"machine.base_dtype {dtype} requires frozen parameters, but none is; see "
            "optimizer.groups"
        )
    if precision == "no" and dtype not in (None, "float32"):
        raise ValueError(
            f"machine.base_dtype {dtype} is set without mixed precision, and matrix products take "
            "one dtype; set --mixed_precision bf16, or remove it"
        )

    # Narrow float32 matrices that are not in 4 bits; for float32, widen all.
    numbers = [one for one in frozen if one.is_floating_point() and not in_four_bits(one)]
    for parameter in numbers if dtype is not None else ():
        wide = dtype == "float32" and parameter.dtype in (torch.bfloat16, torch.float16)
        if wide or (parameter.dtype is torch.float32 and parameter.ndim >= 2):
            parameter.data = parameter.data.to(getattr(torch, str(dtype)))
    if precision == "no" and any(parameter.dtype is torch.float16 for parameter in numbers):
        raise ValueError(
            "a frozen model in float16 without mixed precision: small gradients would underflow; "
            "set --mixed_precision fp16 or bf16, or --machine.base_dtype float32"
        )
    if sharded:
        _store_in_compute_dtype(model, precision)


def in_four_bits(weight: Any) -> bool:
    """Return whether a parameter holds 4-bit numbers (bitsandbytes)."""
    return type(weight).__name__ == "Params4bit"


def _store_in_compute_dtype(model: nn.Module, precision: str) -> None:
    """Store the bytes of 4-bit weights as numbers of the compute dtype.

    FSDP2 shards only floating-point tensors, and casts those that differ from its compute dtype,
    which would corrupt the packed bytes.
    """
    compute = HALF.get(precision, torch.float32)
    modules: Iterator[Any] = model.modules()
    for module in modules:
        weight: Any = getattr(module, "weight", None)
        if in_four_bits(weight):
            if precision in HALF:
                module.compute_dtype = compute
            weight.data = weight.data.view(-1).view(compute).view(-1, 1)
            weight.quant_storage = module.quant_storage = compute
