"""Floating-point operations of a step, what the device can do, and how busy it is."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

PEAKS: dict[str, dict[torch.dtype, float]] = {
    "GB200": {torch.bfloat16: 2500e12, torch.float16: 2500e12, torch.float32: 80e12},
    "B200": {torch.bfloat16: 2250e12, torch.float16: 2250e12, torch.float32: 80e12},
    "H200": {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12},
    "GH200": {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12},
    "H100 PCIe": {torch.bfloat16: 756e12, torch.float16: 756e12, torch.float32: 51e12},
    "H100 NVL": {torch.bfloat16: 835e12, torch.float16: 835e12, torch.float32: 60e12},
    "H100": {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12},
    "A100": {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12},
    "A10G": {torch.bfloat16: 70e12, torch.float16: 70e12, torch.float32: 35e12},
    "L40S": {torch.bfloat16: 362e12, torch.float16: 362e12, torch.float32: 91.6e12},
    "L4": {torch.bfloat16: 121e12, torch.float16: 121e12, torch.float32: 30.3e12},
    "V100": {torch.float16: 125e12, torch.float32: 15.7e12},
    "T4": {torch.float16: 65e12, torch.float32: 8.1e12},
    "4090": {torch.bfloat16: 165e12, torch.float16: 165e12, torch.float32: 82.6e12},
    "3090": {torch.bfloat16: 71e12, torch.float16: 71e12, torch.float32: 35.6e12},
    "MI300X": {torch.bfloat16: 1307e12, torch.float16: 1307e12, torch.float32: 163e12},
    "MI250X": {torch.bfloat16: 383e12, torch.float16: 383e12, torch.float32: 47.9e12},
}
"""dense products per second, from the makers' data sheets, without sparsity; float32 without TF32"""


class Operations(FlopCounterMode):
    """Counts the floating-point operations of what runs inside it; a multiplication and an addition are two.

    torch's counter, but for what recompute does in the backward: it runs with gradients enabled, and is not counted.
    """

    def __init__(self, *, modules: bool = False) -> None:
        super().__init__(display=False)
        tracker: Any = nullcontext()
        tracker.parents = {"Global"}
        if not modules:
            self.mod_tracker = tracker  # torch's own has hooks that break a model that differentiates in its forward
        self.backward = False
        """whether the forward is over; to be set by who calls it"""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> float:
        return float(self.get_total_flops())


def training_flops(
    model: nn.Module, loss: Callable[[nn.Module, Any], tuple[Tensor, Any]], batch: Mapping[str, Any]
) -> float:
    """Floating-point operations of one forward and backward over ``batch``; gradients are left behind.

    Args:
        model: in training mode.
        loss: of the model on a batch, as a task's.
        batch: one batch, on the model's device.
    """
    counted = Operations()
    with counted:
        value, _ = loss(model, batch)
        counted.backward = True
        value.backward()
    return counted.total


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Products and additions per second that the device can make at most, and how that is known.

    From :data:`PEAKS` where the device is in it; else measured by square products, which a model can hardly beat.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peaks in PEAKS.items():
            if known in name and dtype in peaks:
                return peaks[dtype], f"data sheet of {known}"
    return measured_peak(device, dtype), "measured"


def measured_peak(device: torch.device, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Floating-point operations per second of the best of some square products of ``side``, within about 0.05 s."""
    side = side or (512 if device.type == "cpu" else 8192)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    best, until = float("inf"), time.perf_counter() + 0.05
    torch.mm(a, b)
    while True:
        _wait(device)
        began = time.perf_counter()
        torch.mm(a, b)
        _wait(device)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > until:
            return 2.0 * side**3 / best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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
