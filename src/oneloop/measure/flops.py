"""Floating-point operations of a step, and the peak of the device."""

import re
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operators of attention in packed rows
from torch.utils.flop_counter import FlopCounterMode, flop_registry

# Dense TFLOP/s from the vendors' data sheets, without sparsity; 16 bit with sums in float32. 0: the
# device does not have this type.
# device: bfloat16, float16, TF32, float32
PEAKS = {
    "GB200": (2500, 2500, 1250, 80),
    "B200": (2250, 2250, 1125, 80),
    "H200": (989, 989, 494, 67),
    "H200 NVL": (835, 835, 417, 60),
    "GH200": (989, 989, 494, 67),
    "H100": (989, 989, 494, 67),
    "H100 PCIE": (756, 756, 378, 51),
    "H100 NVL": (835, 835, 417, 60),
    "A100": (312, 312, 156, 19.5),
    "A100 PCIE": (312, 312, 156, 19.5),
    "A10G": (70, 70, 35, 35),
    "L40S": (362, 362, 183, 91.6),
    "L40": (181, 181, 90.5, 90.5),
    "L4": (121, 121, 60, 30.3),
    "V100": (0, 125, 0, 15.7),
    "V100 PCIE": (0, 112, 0, 14),
    "T4": (0, 65, 0, 8.1),
    "4090": (165, 165, 82.6, 82.6),
    "3090": (71, 71, 35.6, 35.6),
    "MI300X": (1307, 1307, 0, 163),
    "MI250X": (191, 191, 0, 47.9),  # a device is one of its two dies
}

# Words in the names of devices that do not change the peak: vendor, family, socket, memory.
_WORDS = r"NVIDIA|TESLA|GEFORCE|RTX|AMD|INSTINCT|SXM\d|\d+GB?|HBM3E?"


def _packed(query: Any, *given: Any, **_: Any) -> int:
    """Return the operations of attention in packed rows, which counts as full.

    torch's formula reads the starts of the documents on the host.
    """
    tokens, heads, width = getattr(query, "shape", query)
    length = given[4]
    return int(4 * tokens * length * heads * width)


def _packed_backward(slope: Any, query: Any, *given: Any, **_: Any) -> int:
    """Return the operations of its backward: five products, where the forward has two."""
    return _packed(query, *given[:2], *given[4:]) * 5 // 2


def _attention(
    query: Any,
    key: Any,
    value: Any,
    *given: Any,
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
    """

    def __init__(self) -> None:
        super().__init__(display=False)
        self.flop_registry |= FORMULAS  # torch would wrap those that are its own once more
        # torch's hooks on modules break a model that differentiates in its forward.
        self.mod_tracker: Any = nullcontext()
        self.backward = False  # whether the forward is over; set by the caller
        self.total = 0.0  # operations so far

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        recomputed = self.backward and torch.is_grad_enabled()
        if func_packet in self.flop_registry and not recomputed:
            self.total += self.flop_registry[func_packet](*args, **kwargs, out_val=out)
        return out


def data_sheet(name: str) -> dict[Any, float]:
    """Return FLOP/s of a device by dtype, or nothing if :data:`PEAKS` does not have this very one.

    That of float32 follows torch's setting of TF32.

    A laptop's GPU, a slice (MIG) or another variant has words in its name that are not known here.

    Args:
        name: as torch reports it, such as ``NVIDIA A100-SXM4-40GB``.
    """
    words = re.split(r"[\s-]+", name.upper())
    own = [word for word in words if not re.fullmatch(_WORDS, word)]
    bfloat16, float16, tf32, float32 = PEAKS.get(" ".join(own), (0, 0, 0, 0))
    if torch.get_float32_matmul_precision() != "highest":
        float32 = tf32 or float32  # a device without TF32 ignores the setting
    peaks = {torch.bfloat16: bfloat16, torch.float16: float16, torch.float32: float32}
    return {kind: peak * 1e12 for kind, peak in peaks.items() if peak}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a GPU in matrix products of ``dtype``; 0 for other devices.

    It is that of :data:`PEAKS` if it has the device; else it is measured. Both follow torch's
    setting of TF32."""
    if device.type != "cuda":
        return 0.0
    known = data_sheet(torch.cuda.get_device_name(device))
    return known.get(dtype) or measured_peak(device, dtype)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of several matrix products on a GPU."""
    from torch.utils.benchmark import Timer  # its import takes 0.2 s

    side = 8192
    values = torch.randn(side, side, device=device).to(dtype)
    products = Timer("values @ values", globals={"values": values}).blocked_autorange()
    return float(2.0 * side**3 / min(products.times))
