"""A rank's own part of a sharded tensor."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory; a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
