"""Round frozen matrices as a run in mixed precision held them (``machine.base_dtype``)."""

import torch
from torch import nn

from oneloop.machine.frozen_dtype import in_four_bits


def round_frozen(model: nn.Module, dtype: str | None) -> None:
    """Round frozen float32 matrices to ``dtype`` in place, and keep them stored in float32.

    Args:
        model: not yet wrapped or sharded.
        dtype: None: unchanged.
    """
    if dtype is None:
        return
    rounding: torch.dtype = getattr(torch, dtype)
    for parameter in model.parameters():
        if parameter.requires_grad or in_four_bits(parameter):
            continue
        # as hold_frozen does
        if parameter.dtype is torch.float32 and parameter.ndim >= 2:
            parameter.data = parameter.data.to(rounding).float()
