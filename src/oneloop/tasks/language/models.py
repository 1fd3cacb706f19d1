"""Language models: from scratch, or loaded with transformers, optionally in 4 bits."""

import logging
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from oneloop.basics.base_models import fetched
from oneloop.basics.untrusted import read_json
from oneloop.tasks.language.attention import attend_within_documents
from oneloop.tasks.language.lora_settings import LoRA


def loading_options(lora: LoRA | None) -> dict[str, Any]:
    """Return keyword arguments of from_pretrained: the dtype, and 4 bits for linear layers.

    The output layer is not quantized. Raise ValueError if bitsandbytes is missing.
    """
    if lora is None:
        return {"dtype": torch.float32}
    if lora.quantize is None:
        return {"dtype": "auto"}
    if not import_quietly():
        raise ValueError(
            f"task.lora.quantize {lora.quantize} needs bitsandbytes (pip install bitsandbytes)"
        )
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora.quantize,
        bnb_4bit_use_double_quant=lora.double_quant,
    )
    return {"dtype": "auto", "quantization_config": quantization, "device_map": {"": "cpu"}}


def import_quietly() -> bool:
    """Import bitsandbytes without ``kernels``; return whether bitsandbytes is installed.

    Through ``kernels`` it would download and run compiled code from the hub. Call this before
    importing peft, which imports bitsandbytes, too.
    """
    if "bitsandbytes" in sys.modules:
        return True

    # None makes the import of kernels fail; hide the warning about it.
    before = sys.modules.get("kernels")
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
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
    """Make 4-bit layers compute in the model's dtype, and allow moving the model to a device."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.compute_dtype = model.dtype
            module.compute_type_is_set = True
            # In evaluation on a CPU with AVX-512 it would repack its weights in place for another
            # kernel.
            module.support_avx512bf16_for_cpu = False

    # Accelerate refuses to move a model that has a device map.
    if hasattr(model, "hf_device_map"):
        del model.hf_device_map


Architecture = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Architecture and sizes of a model from scratch.

    Args:
        architecture: gpt2 or llama, for a model from scratch.
        layers: number of transformer blocks.
        heads: number of attention heads.
        width: hidden size.
        length: positions of a model from scratch.
        dropout: dropout of embeddings, attention and residuals (gpt2).
        kv_heads: number of key-value heads (llama; null: as many as heads).
        mlp: width of the MLP (null: 4 x width for gpt2, 8/3 x width for llama).
        tied: share the weights of embedding and output layer (null: true for gpt2, false for
            llama).
        padded_vocab: rows of the embedding and the output layer, at least the vocabulary size (0:
            equal to it).
    """

    architecture: Architecture = "gpt2"
    layers: int = 4
    heads: int = 4
    width: int = 128
    length: int = 128
    dropout: float = 0.0
    kv_heads: int | None = None
    mlp: int | None = None
    tied: bool | None = None
    padded_vocab: int = 0

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
SCRATCH["kv_heads"] = "model=null architecture=llama"
"""task arguments that apply only to a model from scratch (Task.needs)"""


def scratch_config(
    shape: Shape,
    *,
    entries: int,
    begin: int | None = None,
    end: int | None = None,
    padding: int | None = None,
    architecture: str = "",
) -> Any:
    """Return the configuration of a model from scratch; its other values are the defaults.

    Args:
        shape: architecture and sizes. Without ``mlp``, Llama's MLP has the width 8/3 x ``width``,
            rounded up to a multiple of 32, and that of the others 4 x ``width``.
        entries: vocabulary size of the tokenizer.
        begin: id of the token that begins a text (None: there is none).
        end: id of the token that ends a text, likewise.
        padding: id of the padding token, likewise.
        architecture: bert or distilbert, in place of the architecture of the shape.

    Raises:
        ValueError: the vocabulary exceeds ``padded_vocab``.
    """
    from transformers import AutoConfig

    if 0 < shape.padded_vocab < entries:
        raise ValueError(
            f"task.padded_vocab {shape.padded_vocab} is smaller than the vocabulary of "
            f"{entries:,} tokens"
        )
    architecture = architecture or shape.architecture
    configured = partial(
        AutoConfig.for_model,
        architecture,
        vocab_size=shape.padded_vocab or entries,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        max_position_embeddings=shape.length,
        bos_token_id=begin,
        eos_token_id=end,
        pad_token_id=padding,
        use_cache=False,
    )
    dropout = shape.dropout
    match architecture:
        case "gpt2":
            return configured(
                tie_word_embeddings=shape.tied is not False,
                n_inner=shape.mlp,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
            )
        case "llama":
            return configured(
                tie_word_embeddings=shape.tied is True,
                num_key_value_heads=shape.kv_heads,
                intermediate_size=shape.mlp or int(8 * shape.width / 3 / 32 + 1) * 32,
            )
        case "distilbert":
            return configured(
                hidden_dim=4 * shape.width, dropout=dropout, attention_dropout=dropout
            )
    return configured(
        intermediate_size=4 * shape.width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


def reject_quantized(name: str, lora: LoRA | None) -> None:
    """Raise ValueError if a model is quantized, and cannot be trained or get adapters.

    A 4-bit model of bitsandbytes can get adapters, unless ``lora`` would quantize it again.
    """
    file = fetched(name, "config.json")
    config = read_json(file).get("quantization_config") if file else None
    if not isinstance(config, dict):
        return
    kind = config.get("bnb_4bit_quant_type") if config.get("load_in_4bit") else None
    if kind is None:
        raise ValueError(
            f"task.model {name!r} is quantized ({config.get('quant_method')}), and only 4-bit "
            "models of bitsandbytes can get adapters; use the unquantized model"
        )
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
    """Give the model attention within documents if possible; return whether it is.

    Args:
        model: a model of transformers.
        packed: whether a sample has several documents, which need this attention.
        router_loss: refuse an auxiliary loss of the routers, or none: train without it.

    Raises:
        ValueError: the model does not support it and samples are packed, or its routers have an
            auxiliary loss.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if coefficient and router_loss == "refuse":
        raise ValueError(
            f"{type(model).__name__} balances experts by an auxiliary loss over the micro-batch "
            f"(router_aux_loss_coef {coefficient}): another parallel layout would train a "
            "different model; set task.router_loss none"
        )
    try:
        attend_within_documents(model, packed=packed)
    except ValueError as error:
        if packed:
            raise ValueError(f"task.pack packed: {error}; use task.pack padded") from error
        return False
    return True
