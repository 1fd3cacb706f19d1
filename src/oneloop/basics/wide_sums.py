"""Double precision on every device: Apple's GPUs (MPS) have no float64."""

import torch
from torch import Tensor

NO_FLOAT64 = {"mps"}
"""types of devices without float64"""


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest real dtype that a device has: float64, or float32."""
    return torch.float32 if device.type in NO_FLOAT64 else torch.float64


def widest(tensor: Tensor) -> Tensor:
    """Return a tensor in the widest real dtype of its device."""
    return tensor.to(wide_dtype(tensor.device))


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 in host memory. Host sync.

    The host converts it: a device may have no float64.
    """
    return tensor.detach().cpu().double()
