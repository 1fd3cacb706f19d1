"""How busy the device is, as its driver says (NVML)."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch


def utilisation(device: torch.device) -> float:
    """Share of the driver's last sampling period (at most a second) in which a kernel ran; NaN where unknown."""
    handle = _handle(device)
    if handle is None:
        return math.nan
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:  # a slice of a device (MIG) does not say
        return math.nan


@cache
def _handle(device: torch.device) -> Any:
    """NVML's name for the device; None where there is none. By its UUID: CUDA_VISIBLE_DEVICES changes the numbers."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no NVML here: nothing to show, and nothing to stop for
        return None
