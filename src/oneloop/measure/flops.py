"""Floating-point operations of a step, peak of the device, and device utilisation."""

import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators of attention in packed rows
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_TRIES = 3  # measurements of the peak, at most
_SECONDS = 0.02  # of one measurement

TF32 = "tf32"
"""key of the peak in float32 with TF32 (machine.matmul high or medium)"""


def _peaks(bfloat16: float, float16: float, tf32: float, float32: float) -> dict[Any, float]:
    """Return FLOP/s by dtype, without those that the device does not have (0)."""
    peaks = {
        torch.bfloat16: bfloat16,
        torch.float16: float16,
        TF32: tf32,
        torch.float32: float32,
    }
    return {kind: peak * 1e12 for kind, peak in peaks.items() if peak}


# Dense TFLOP/s from the vendors' data sheets, without sparsity; 16 bit with sums in float32.
# device: bfloat16, float16, TF32, float32
PEAKS = {
    "GB200": _peaks(2500, 2500, 1250, 80),
    "B200": _peaks(2250, 2250, 1125, 80),
    "H200": _peaks(989, 989, 494, 67),
    "H200 NVL": _peaks(835, 835, 417, 60),
    "GH200": _peaks(989, 989, 494, 67),
    "H100": _peaks(989, 989, 494, 67),
    "H100 PCIE": _peaks(756, 756, 378, 51),
    "H100 NVL": _peaks(835, 835, 417, 60),
    "A100": _peaks(312, 312, 156, 19.5),
    "A100 PCIE": _peaks(312, 312, 156, 19.5),
    "A10G": _peaks(70, 70, 35, 35),
    "L40S": _peaks(362, 362, 183, 91.6),
    "L40": _peaks(181, 181, 90.5, 90.5),
    "L4": _peaks(121, 121, 60, 30.3),
    "V100": _peaks(0, 125, 0, 15.7),
    "V100 PCIE": _peaks(0, 112, 0, 14),
    "T4": _peaks(0, 65, 0, 8.1),
    "4090": _peaks(165, 165, 82.6, 82.6),
    "3090": _peaks(71, 71, 35.6, 35.6),
    "MI300X": _peaks(1307, 1307, 0, 163),
    "MI250X": _peaks(191, 191, 0, 47.9),  # a device is one of its two dies
}

# Words in the names of devices that do not change the peak: vendor, family, socket, memory.
_WORDS = r"NVIDIA|TESLA|GEFORCE|RTX|AMD|INSTINCT|SXM\d|\d+GB?|HBM3E?"


def _packed(query: Any, *given: Any, out_val: Any = None, **_: Any) -> int:
    """Return the operations of attention in packed rows, which counts as full.

    torch's formula reads the starts of the documents on the host.
    """
    tokens, heads, width = getattr(query, "shape", query)
    length = given[4]
    return int(4 * tokens * length * heads * width)


def _packed_backward(slope: Any, query: Any, *given: Any, out_val: Any = None, **_: Any) -> int:
    """Return the operations of its backward: five products, where the forward has two."""
    return _packed(query, *given[:2], *given[4:]) * 5 // 2


def _attention(
    query: Any,
    key: Any,
    value: Any,
    *given: Any,
    out_val: Any = None,
    **_: Any,
) -> int:
    """Return the operations of attention, which counts as full: two products for each head.

    Several heads of the query may share one of the key.
    """
    scores = query.shape[:3].numel() * key.shape[2]
    return int(2 * scores * (query.shape[3] + value.shape[3]))


def _attention_backward(slope: Any, query: Any, key: Any, value: Any, *given: Any, **_: Any) -> int:
    """Return the operations of its backward: the scores again, and two products for each."""
    again = _attention(query, key, query) // 2
    return again + 2 * _attention(query, key, value)


# Formulas of operators that torch's counter lacks, or has in another form.
_ATEN = torch.ops.aten
FORMULAS = {
    _ATEN.addmm_: flop_registry[_ATEN.addmm],
    _ATEN.baddbmm_: flop_registry[_ATEN.baddbmm],
    torch.ops.torch_attn._varlen_attn: _packed,
    torch.ops.torch_attn._varlen_attn_backward: _packed_backward,
}

# torch raises for shared key heads before 2.12, and counts nothing on a CPU before 2.15.
for _name in (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
):
    FORMULAS[getattr(_ATEN, _name)] = _attention
    FORMULAS[getattr(_ATEN, f"{_name}_backward")] = _attention_backward


class Operations(FlopCounterMode):
    """Counts the floating-point operations in its context; a multiply-add counts as two.

    Unlike torch's counter, it does not count activation checkpointing's recomputation, which runs
    in the backward with gradients enabled.

    Args:
        modules: Also count by module.
    """

    def __init__(self, *, modules: bool = False) -> None:
        super().__init__(display=False)
        self.flop_registry |= FORMULAS  # torch would wrap those that are its own once more
        # torch's hooks on modules break a model that differentiates in its forward.
        if not modules:
            tracker: Any = nullcontext()
            tracker.parents = {"Global"}
            self.mod_tracker = tracker
        self.backward = False  # whether the forward is over; set by the caller

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.backward and torch.is_grad_enabled():
            return out
        return super()._count_flops(func_packet, out, args, kwargs)  # type: ignore[no-untyped-call]

    @property
    def total(self) -> float:
        """Number of operations so far."""
        return float(self.get_total_flops())


def data_sheet(name: str) -> dict[Any, float]:
    """Return the peaks of a device, or nothing if :data:`PEAKS` does not have exactly this one.

    A laptop's GPU, a slice (MIG) or another variant has words in its name that are not known here.

    Args:
        name: as torch reports it, such as ``NVIDIA A100-SXM4-40GB``.
    """
    words = re.split(r"[\s-]+", name.upper())
    own = [word for word in words if not re.fullmatch(_WORDS, word)]
    return PEAKS.get(" ".join(own), {})


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of the device in matrix products of ``dtype``.

    It is that of :data:`PEAKS` if it has the device; else it is measured. Both follow torch's
    setting of TF32. 0 if another program used the cores of a CPU meanwhile."""
    if device.type == "cuda":
        peaks = data_sheet(torch.cuda.get_device_name(device))
        if dtype in peaks:
            return in_float32(peaks) if dtype is torch.float32 else peaks[dtype]
    return measured_peak(device, dtype)


def in_float32(peaks: Mapping[Any, float]) -> float:
    """Return the peak of a device of :data:`PEAKS` in float32, as torch's TF32 is set now."""
    if torch.get_float32_matmul_precision() == "highest":
        return peaks[torch.float32]
    return peaks.get(TF32, peaks[torch.float32])  # a device without TF32 ignores the setting


def measured_peak(device: torch.device, dtype: torch.dtype, *, side: int | None = None) -> float:
    """Measure the FLOP/s of the fastest of several matrix products; takes about 0.02 s.

    On a CPU that another program uses, it tries three times.

    Args:
        device: Where to compute.
        dtype: dtype of the matrices.
        side: Rows and columns of the matrices (None: by device).

    Returns:
        FLOP/s; 0 if another program used the CPU each time.
    """
    if side is None:
        side = {"cpu": 512, "mps": 2048}.get(device.type, 8192)
    a = torch.randn(side, side, device=device).to(dtype)
    b = torch.randn(side, side, device=device).to(dtype)
    torch.mm(a, b)  # warm up
    for _ in range(_TRIES):
        passed: list[float] = []
        used: list[float] = []
        until = time.perf_counter() + _SECONDS
        while not passed or time.perf_counter() < until:
            _wait(device)
            began = time.perf_counter()
            busy = time.thread_time()
            torch.mm(a, b)
            _wait(device)
            used.append(time.thread_time() - busy)
            passed.append(time.perf_counter() - began)
        if device.type != "cpu" or undisturbed(passed, used):
            return 2.0 * side**3 / min(passed)
    return 0.0


def undisturbed(passed: Sequence[float], used: Sequence[float]) -> bool:
    """Return whether no other program used the cores while equal products were computed.

    Args:
        passed: seconds of each product.
        used: seconds of CPU time of this thread in each product.
    """
    # The fastest product was never interrupted, and most others took hardly longer.
    best = min(passed)
    at_best = used[passed.index(best)]
    return at_best >= 0.9 * best and statistics.median(passed) <= 1.25 * best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def utilisation(device: torch.device) -> float:
    """Return the share of the time in which a kernel ran; NaN if unknown.

    The time is the driver's last sampling period, up to 1 s."""
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
    """Return NVML's handle, or None."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        import pynvml

        # Find it by UUID, because CUDA_VISIBLE_DEVICES changes the indices.
        uuid = torch.cuda.get_device_properties(device).uuid
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # no NVML: the metric is left out
        return None
