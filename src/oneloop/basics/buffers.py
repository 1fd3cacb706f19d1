"""Buffers that ranks move each by itself, such as BatchNorm's running statistics: rank 0's are those that count."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def share_buffers(model: nn.Module) -> None:
    """Copy rank 0's buffers to every rank, in one broadcast of their bytes. Collective. The model may be bare, DDP or
    FSDP2."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    if not buffers:
        return
    flat = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
    joined = torch.cat(flat)
    dist.broadcast(joined, src=0)
    for buffer, got in zip(buffers, joined.split([len(own) for own in flat]), strict=True):
        buffer.copy_(got.clone().view(buffer.dtype).view(buffer.shape))  # a copy is aligned for every type
