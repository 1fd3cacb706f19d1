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
    for parameter in model.parameters():
        held = dtype is not None and not parameter.requires_grad and parameter.ndim >= 2
        # as hold_frozen does
        if held and parameter.dtype is torch.float32 and not in_four_bits(parameter):
            parameter.data = parameter.data.to(getattr(torch, str(dtype))).float()
