"""Sums in double precision on every device: Apple's GPUs (MPS) have no float64."""

import torch
from torch import Tensor

NO_FLOAT64 = {"mps"}
"""types of devices without float64"""
DOUBLE = (torch.float64, torch.complex128)
"""dtypes that they lack"""


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


class WideSum:
    """Sums in double precision, without a host sync.

    On a device without float64, each sum has four float32 numbers: each holds what the number
    before it has lost by rounding. (Ogita, Rump and Oishi 2005, algorithm SumK.)

    Args:
        shape: of the sums.
        device: of the sums (default: the host).
    """

    def __init__(self, *shape: int, device: torch.device | None = None) -> None:
        device = device or torch.device("cpu")
        wide = wide_dtype(device)
        numbers = 1 if wide is torch.float64 else 4
        self.parts = torch.zeros(numbers, *shape, dtype=wide, device=device)
        """the numbers of all sums, shape (numbers, *shape); a sum is that of its numbers"""

    @torch.no_grad()
    def add(self, values: Tensor) -> None:
        """Add values, of the shape of the sums."""
        values = values.to(self.parts.dtype)
        *first, last = self.parts
        for part in first:
            total, lost = _two_sum(part, values)
            part.copy_(total)
            values = torch.where(total.isfinite(), lost, torch.zeros_like(lost))
        last.add_(values)

    def value(self) -> Tensor:
        """Return the sums in float64: on their device, or on the host if it has no float64."""
        if len(self.parts) == 1:
            return self.parts[0]
        return on_host(self.parts).sum(0)

    def to(self, device: torch.device) -> "WideSum":
        """Return the sums on another device."""
        moved = WideSum(*self.parts.shape[1:], device=device)
        if moved.parts.dtype is self.parts.dtype:
            moved.parts = self.parts.to(device)
            return moved

        # Divide each sum into the numbers of the other form.
        rest = self.value()
        for _ in moved.parts:
            part = rest.to(moved.parts.dtype)
            moved.add(part.to(device))
            rest = rest - part
        return moved


def _two_sum(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded sum of two tensors, and exactly what the rounding loses.

    The algorithm is Knuth's (The Art of Computer Programming, volume 2, section 4.2.2).
    """
    total = one + other
    back = total - one
    lost = (one - (total - back)) + (other - back)
    return total, lost
