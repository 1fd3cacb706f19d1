"""A number that is copied from the device to the host without a wait."""

import torch
from torch import Tensor


class DeviceFlag:
    """An asynchronous copy of a number from the device to the host.

    Args:
        device: of the number.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = torch.zeros((), pin_memory=device.type == "cuda")
        self._view = self._host.numpy()
        self._copied = torch.Event(device) if device.type != "cpu" else None

    def send(self, value: Tensor) -> None:
        """Start the copy of a 0-dim tensor."""
        # Cast on the device: an Apple GPU copies bytes.
        self._host.copy_(value.to(self._host.dtype), non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> int:
        """Return the number. Wait for the copy, if the device has not made it yet."""
        if self._copied is not None:
            self._copied.synchronize()
        return int(self._view)
