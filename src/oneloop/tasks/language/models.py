"""Language models: from scratch, or loaded by transformers, in 4 bits if asked."""

import json
import logging
import sys
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from oneloop.basics.base_models import fetched
from oneloop.tasks.language.attention import attend_within_documents
from oneloop.tasks.language.lora_settings import LoRA
from oneloop.tasks.transformers_models import auto_model

FourBits = Literal["nf4", "fp4"]


def in_four_bits(kind: FourBits, *, double_quant: bool) -> dict[str, Any]:
    """Return the options with which transformers loads linear layers, except the output layer, in 4 bits. Raises
    ValueError without bitsandbytes."""
    if not import_quietly():
        raise ValueError(f"task.lora.quantize {kind} needs bitsandbytes (pip install 'oneloop[lora]')")
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
        del model.hf_device_map  # accelerate would reject to move it


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


Architecture = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Of a model from scratch."""

    architecture: Architecture
    layers: int
    heads: int
    width: int
    length: int  # positions
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"task.width {self.width} is not divisible by task.heads {self.heads}")


SCRATCH = dict.fromkeys(("architecture", "layers", "heads", "width"), "model=null")
"""arguments of a task that shape a model from scratch, and have no effect on another (Task.needs)"""


def from_scratch(shape: Shape, *, entries: int, begin: int | None, end: int) -> nn.Module:
    """Build a GPT-2 or Llama (its MLP 8/3 as wide, in steps of 32) with random weights; ``begin`` and ``end`` are token
    ids."""
    import transformers

    common = {"vocab_size": entries, "use_cache": False, "bos_token_id": begin, "eos_token_id": end}
    if shape.architecture == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
        sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "n_positions": shape.length}
        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**common, **sizes, **dropout))
    else:
        config = transformers.LlamaConfig(
            **common,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            intermediate_size=int(8 * shape.width / 3 / 32 + 1) * 32,
            max_position_embeddings=shape.length,
        )
        model = transformers.LlamaForCausalLM(config)
    return model  # type: ignore[no-any-return]


def known(
    name: str, *, entries: int, length: tuple[int, str], lora: LoRA | None = None, **weights: bool
) -> tuple[nn.Module, list[str]]:
    """Load a model of transformers; return it and a line for the log. ``entries`` is the size of its tokenizer,
    ``length`` that of a sample, and its key; with ``lora`` it keeps its dtype, or has 4 bits. Raises ValueError if
    it does not fit."""
    options: dict[str, Any] = {} if lora is None else {"dtype": "auto"}
    reject_quantized(name, lora)
    if lora is not None and lora.quantize is not None:
        options |= in_four_bits(lora.quantize, double_quant=lora.double_quant)
    model, notes = auto_model("AutoModelForCausalLM", name, None, **weights, **options)
    settle_four_bits(model)
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and length[0] > longest:
        raise ValueError(f"task.{length[1]} {length[0]} exceeds the {longest} positions of {name}; lower it")
    if entries > config.vocab_size:
        sizes = f"its tokenizer has {entries:,} entries, and the model {config.vocab_size:,}"
        raise ValueError(f"{name}: {sizes}; it is of another model, or the embeddings were not resized")
    return model, notes


def reject_quantized(name: str, lora: LoRA | None) -> None:
    """Raise ValueError if a quantized model would be trained itself or quantized again, or is not of bitsandbytes' 4
    bits."""
    file = fetched(name, "config.json")
    about = json.loads(file.read_text()).get("quantization_config") if file else None
    if not about:
        return
    kind = about.get("bnb_4bit_quant_type") if about.get("load_in_4bit") else None
    if kind is None:
        method = about.get("quant_method")
        ways = "only 4-bit models of bitsandbytes can get adapters; use the unquantized model"
        raise ValueError(f"task.model {name!r} is quantized ({method}), and {ways}")
    if lora is None:
        raise ValueError(f"task.model {name!r} is in 4 bits ({kind}), which cannot be trained; give task.lora.rank 16")
    if lora.quantize is not None:
        raise ValueError(
            f"task.lora.quantize {lora.quantize}: {name!r} is in 4 bits ({kind}) already; remove task.lora.quantize"
        )


def made_ready(model: nn.Module, *, packed: bool, router_loss: str) -> bool:
    """Give the model attention within documents if possible; return whether it has that. Raises ValueError if it has
    not and samples are ``packed``, or if its routers have an auxiliary loss."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if coefficient and router_loss == "refuse":
        loss = f"an auxiliary loss over the micro-batch (router_aux_loss_coef {coefficient})"
        why = "another parallel layout would train a different model"
        raise ValueError(f"{type(model).__name__} balances experts by {loss}: {why}; set task.router_loss none")
    try:
        attend_within_documents(model, packed=packed)
    except ValueError as error:
        if packed:
            raise ValueError(f"task.pack packed: {error}; use task.pack padded") from error
        return False
    return True
