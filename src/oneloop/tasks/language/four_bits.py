"""Frozen linear layers in 4 bits, by bitsandbytes (QLoRA, Dettmers et al. 2023)."""

from __future__ import annotations

import logging
import sys
from typing import Any, Literal

from torch import nn

FourBits = Literal["nf4", "fp4"]


def in_four_bits(kind: FourBits, *, double_quant: bool) -> dict[str, Any]:
    """Return the options with which transformers loads linear layers, except the output layer, in 4 bits. Raises
    ValueError without bitsandbytes."""
    if not import_quietly():
        raise ValueError(
            f"task.lora.quantize {kind} needs bitsandbytes, which is not installed (pip install 'oneloop[lora]')"
        )
    from transformers import BitsAndBytesConfig

    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double_quant)
    return {"quantization_config": how, "device_map": {"": "cpu"}}


def import_quietly() -> bool:
    """Imports bitsandbytes, where it is installed, without the kernels that it would fetch from the hub, as compiled
    code, and run. peft imports it too: call this before. Says whether it is there."""
    if "bitsandbytes" in sys.modules:
        return True
    before = sys.modules.get("kernels")
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logger.setLevel(logging.ERROR)  # of its warning that there are none
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        return False
    finally:
        logger.setLevel(level)
        del sys.modules["kernels"]
        if before is not None:
            sys.modules["kernels"] = before
    return True


def settle_four_bits(model: Any) -> None:
    """Has layers in 4 bits compute in the model's own type, in evaluation as in training, and lets whoever places the
    model place it anew."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype, module.compute_type_is_set = model.dtype, True
            # In evaluation on a CPU with AVX-512 it would pack its weights anew, in place, for a product of its own.
            module.support_avx512bf16_for_cpu = False
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map  # accelerate would refuse to move it


def quantized(module: nn.Module) -> bool:
    """Whether it is a linear layer in 4 bits."""
    return type(module).__name__ == "Linear4bit" and hasattr(module, "quant_state")


def plain_layer(layer: Any, model: nn.Module) -> Any:
    """A linear layer itself; of one in 4 bits, another with what these stand for."""
    if not quantized(layer):
        return layer
    from bitsandbytes.functional import dequantize_4bit

    made = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    made.weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(model.dtype)  # type: ignore[arg-type]
    if layer.bias is not None:
        made.bias.data = layer.bias.data
    return made


def as_it_was(made: Any, layer: Any) -> nn.Module:
    """What :func:`plain_layer` made of ``layer``, of the class that this was before it was in 4 bits: GPT-2's are
    transposed."""
    if not quantized(layer) or getattr(getattr(layer, "source_cls", None), "__name__", "") != "Conv1D":
        return made  # type: ignore[no-any-return]
    from transformers.pytorch_utils import Conv1D

    turned = Conv1D(made.out_features, made.in_features)
    turned.weight.data = made.weight.data.T.contiguous()
    if made.bias is not None:
        turned.bias.data = made.bias.data
    return turned  # type: ignore[no-any-return]
