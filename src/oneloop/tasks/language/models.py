"""Language models: from scratch, or loaded with transformers, optionally in 4 bits."""

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


def four_bit_options(kind: FourBits, *, double_quant: bool) -> dict[str, Any]:
    """Return options of from_pretrained for linear layers, but the output layer, in 4 bits. Raise
    ValueError."""
    if not import_quietly():
        raise ValueError(f"task.lora.quantize {kind} needs bitsandbytes (pip install bitsandbytes)")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double_quant
    )
    return {"quantization_config": config, "device_map": {"": "cpu"}}


def import_quietly() -> bool:
    """Import bitsandbytes without ``kernels``, through which it would download and run compiled
    code from the hub. Call this before importing peft, which imports it too. Return whether
    bitsandbytes is installed."""
    if "bitsandbytes" in sys.modules:
        return True
    before = sys.modules.get("kernels")
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logger.setLevel(logging.ERROR)  # hide the warning about missing kernels
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


def configure_four_bits(model: Any) -> None:
    """Make 4-bit layers compute in the model's dtype, also in evaluation, and allow moving the
    model to a device."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype, module.compute_type_is_set = model.dtype, True
            # In evaluation on a CPU with AVX-512 it would repack its weights in place for another
            # kernel.
            module.support_avx512bf16_for_cpu = False
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map  # Accelerate refuses to move a model that has it


def quantized(module: nn.Module) -> bool:
    """Whether a module is a 4-bit linear layer."""
    return type(module).__name__ == "Linear4bit" and hasattr(module, "quant_state")


def plain_layer(layer: Any, model: nn.Module) -> Any:
    """Return a linear layer unchanged, and a 4-bit layer dequantized to the model's dtype."""
    if not quantized(layer):
        return layer
    from bitsandbytes.functional import dequantize_4bit

    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(model.dtype)  # type: ignore[arg-type]
    if layer.bias is not None:
        plain.bias.data = layer.bias.data
    return plain


def to_source_class(plain: Any, layer: Any) -> nn.Module:
    """Convert a result of :func:`plain_layer` to the class of ``layer`` before quantization (Conv1D
    in GPT-2)."""
    if (
        not quantized(layer)
        or getattr(getattr(layer, "source_cls", None), "__name__", "") != "Conv1D"
    ):
        return plain  # type: ignore[no-any-return]
    from transformers.pytorch_utils import Conv1D

    transposed = Conv1D(plain.out_features, plain.in_features)
    transposed.weight.data = plain.weight.data.T.contiguous()
    if plain.bias is not None:
        transposed.bias.data = plain.bias.data
    return transposed  # type: ignore[no-any-return]


Architecture = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Architecture and sizes of a model from scratch."""

    architecture: Architecture
    layers: int
    heads: int
    width: int
    length: int  # positions
    dropout: float = 0.0
    kv_heads: int | None = None  # None: as many as heads
    mlp: int | None = None  # width of the MLP; None: that of the architecture
    # whether embedding and output layer share their weights; None: that of the architecture
    tied: bool | None = None
    padded_vocab: int = 0  # rows of the embedding, at least the vocabulary size

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"task.width {self.width} is not divisible by task.heads {self.heads}")
        if self.heads % (self.kv_heads or 1):
            raise ValueError(
                f"task.heads {self.heads} is not divisible by task.kv_heads {self.kv_heads}"
            )


SCRATCH = dict.fromkeys(
    ("architecture", "layers", "heads", "width", "mlp", "tied", "padded_vocab"), "model=null"
)
SCRATCH |= {"kv_heads": "model=null architecture=llama"}
"""task arguments that apply only to a model from scratch (Task.needs)"""


def from_scratch(shape: Shape, *, entries: int, begin: int | None, end: int) -> nn.Module:
    """Build a GPT-2 or Llama (MLP width 8/3 x width, rounded up to a multiple of 32) with random
    weights. ``begin`` and ``end`` are token ids. Raise ValueError if the vocabulary of ``entries``
    tokens exceeds ``padded_vocab``."""
    import transformers

    if 0 < shape.padded_vocab < entries:
        raise ValueError(
            f"task.padded_vocab {shape.padded_vocab} is smaller than the vocabulary of "
            f"{entries:,} tokens"
        )
    common: dict[str, Any] = {"vocab_size": shape.padded_vocab or entries, "use_cache": False}
    common |= {"bos_token_id": begin, "eos_token_id": end}
    common |= {} if shape.tied is None else {"tie_word_embeddings": shape.tied}
    if shape.architecture == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
        sizes: dict[str, Any] = {
            "n_embd": shape.width,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_positions": shape.length,
        }
        sizes |= {"n_inner": shape.mlp}
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**common, **sizes, **dropout)
        )
    else:
        config = transformers.LlamaConfig(
            **common,
            hidden_size=shape.width,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            intermediate_size=shape.mlp or int(8 * shape.width / 3 / 32 + 1) * 32,
            max_position_embeddings=shape.length,
        )
        model = transformers.LlamaForCausalLM(config)
    return model  # type: ignore[no-any-return]


def load_model(
    name: str, *, entries: int, length: tuple[int, str], lora: LoRA | None = None, **weights: bool
) -> tuple[nn.Module, list[str]]:
    """Load a model of transformers; return it and lines for the log. ``entries`` is the tokenizer's
    vocabulary size, ``length`` the sample length and its task key. With ``lora`` the model keeps
    its dtype or is quantized. Raise ValueError if the sizes do not fit."""
    options: dict[str, Any] = {} if lora is None else {"dtype": "auto"}
    reject_quantized(name, lora)
    if lora is not None and lora.quantize is not None:
        options |= four_bit_options(lora.quantize, double_quant=lora.double_quant)
    model, notes = auto_model("AutoModelForCausalLM", name, None, **weights, **options)
    configure_four_bits(model)
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and length[0] > longest:
        raise ValueError(
            f"task.{length[1]} {length[0]} exceeds the {longest} positions of {name}; lower it"
        )
    if entries > config.vocab_size:
        sizes = f"its tokenizer has {entries:,} entries, and the model {config.vocab_size:,}"
        raise ValueError(
            f"{name}: {sizes}; it belongs to another model, or the embeddings were not resized"
        )
    return model, notes


def reject_quantized(name: str, lora: LoRA | None) -> None:
    """Raise ValueError unless a quantized model is bitsandbytes' 4-bit, with adapters, and not
    quantized again."""
    file = fetched(name, "config.json")
    config = json.loads(file.read_text()).get("quantization_config") if file else None
    if not config:
        return
    kind = config.get("bnb_4bit_quant_type") if config.get("load_in_4bit") else None
    if kind is None:
        method = config.get("quant_method")
        advice = "only 4-bit models of bitsandbytes can get adapters; use the unquantized model"
        raise ValueError(f"task.model {name!r} is quantized ({method}), and {advice}")
    if lora is None:
        raise ValueError(
            f"task.model {name!r} is in 4 bits ({kind}), which cannot be trained; give "
            "task.lora.rank 16"
        )
    if lora.quantize is not None:
        raise ValueError(
            f"task.lora.quantize {lora.quantize}: {name!r} is in 4 bits ({kind}) already; remove it"
        )


def prepare_attention(model: nn.Module, *, packed: bool, router_loss: str) -> bool:
    """Give the model attention within documents if possible; return whether it is. Raise ValueError
    if it is not and samples are ``packed``, or if the routers have an auxiliary loss."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if coefficient and router_loss == "refuse":
        loss = f"an auxiliary loss over the micro-batch (router_aux_loss_coef {coefficient})"
        why = "another parallel layout would train a different model"
        raise ValueError(
            f"{type(model).__name__} balances experts by {loss}: {why}; set task.router_loss none"
        )
    try:
        attend_within_documents(model, packed=packed)
    except ValueError as error:
        if packed:
            raise ValueError(f"task.pack packed: {error}; use task.pack padded") from error
        return False
    return True
