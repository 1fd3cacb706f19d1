"""Floating-point operations of a step, peak of the device, and device utilisation."""

import math
import time
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

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
"""dense FLOP/s from the vendors' data sheets, without sparsity; float32 without TF32"""

IN_PLACE = {getattr(torch.ops.aten, f"{n}_"): flop_registry[getattr(torch.ops.aten, n)] for n in ("addmm", "baddbmm")}


class Operations(FlopCounterMode):
    """Counts the floating-point operations in its context; a multiply-add counts as two.

    Unlike torch's counter, it does not count activation checkpointing's recomputation, which runs in the backward with
    gradients enabled.
    """

    def __init__(self, *, modules: bool = False) -> None:
        super().__init__(display=False, custom_mapping=IN_PLACE)
        tracker: Any = nullcontext()
        tracker.parents = {"Global"}
        if not modules:
            self.mod_tracker = tracker  # torch's hooks break a model that differentiates in its forward
        self.backward = False
        """whether the forward is over; set by the caller"""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> float:
        return float(self.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Return the peak FLOP/s of the device, and the source of that number.

    The source is :data:`PEAKS` if it has the device; else the peak is measured with square matrix products.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peaks in PEAKS.items():
            if known in name and dtype in peaks:
                return peaks[dtype], f"data sheet of {known}"
    return measured_peak(device, dtype), "measured"


def measured_peak(device: torch.device, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Measure the FLOP/s of the fastest of several (``side``, ``side``) matrix products; takes about 0.05 s."""
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
    """Return the share of the driver's last sampling period (up to 1 s) in which a kernel ran; NaN if unknown."""
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
    """Return NVML's handle, or None. Found by UUID, because CUDA_VISIBLE_DEVICES changes the device indices."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no NVML: the metric is left out
        return None
