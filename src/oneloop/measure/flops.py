"""Floating-point operations of a step, peak of the device, and device utilisation."""

import math
import re
import time
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_TFLOPS = """GB200: 2500 2500 80; B200: 2250 2250 80; H200: 989 989 67; GH200: 989 989 67
H100 PCIe: 756 756 51
H100 NVL: 835 835 60; H100: 989 989 67; A100: 312 312 19.5; A10G: 70 70 35; L40S: 362 362 91.6
L4: 121 121 30.3; V100: 0 125 15.7; T4: 0 65 8.1; 4090: 165 165 82.6; 3090: 71 71 35.6
MI300X: 1307 1307 163; MI250X: 383 383 47.9"""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PEAKS = {
    name: {
        dtype: float(peak) * 1e12
        for dtype, peak in zip(_DTYPES, peaks.split(), strict=True)
        if peak != "0"
    }
    for name, peaks in (entry.split(": ") for entry in re.split(r"; |\n", _TFLOPS))
}  # dense FLOP/s from the vendors' data sheets, without sparsity; float32 without TF32

IN_PLACE = {
    getattr(torch.ops.aten, f"{n}_"): flop_registry[getattr(torch.ops.aten, n)]
    for n in ("addmm", "baddbmm")
}


class Operations(FlopCounterMode):
    """Counts the floating-point operations in its context; a multiply-add counts as two.

    Unlike torch's counter, it does not count activation checkpointing's recomputation, which runs
    in the backward with gradients enabled."""

    def __init__(self, *, modules: bool = False) -> None:
        super().__init__(display=False, custom_mapping=IN_PLACE)
        tracker: Any = nullcontext()
        tracker.parents = {"Global"}
        if not modules:
            # torch's hooks break a model that differentiates in its forward
            self.mod_tracker = tracker
        self.backward = False  # whether the forward is over; set by the caller

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> float:
        return float(self.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of the device, and the source of that number.

    The source is :data:`PEAKS` if it has the device; else the peak is measured with square matrix
    products."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peaks in PEAKS.items():
            if known in name and dtype in peaks:
                return peaks[dtype], f"data sheet of {known}"
    return measured_peak(device, dtype), "measured"


def measured_peak(device: torch.device, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Measure the FLOP/s of the fastest of several (``side``, ``side``) matrix products; takes
    about 0.05 s."""
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
    """Return the share of the driver's last sampling period (up to 1 s) in which a kernel ran; NaN
    if unknown."""
    handle = _handle(device)
    if handle is None:
        return math.nan
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
    except pynvml.NVMLError:  # not available for a MIG slice
        return math.nan


@cache
def _handle(device: torch.device) -> Any:
    """Return NVML's handle, or None. Found by UUID, because CUDA_VISIBLE_DEVICES changes the device
    indices."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
    except Exception:  # no NVML: the metric is left out
        return None
