"""The models of language tasks: of a shape from scratch, or known to transformers; made ready to be trained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from oneloop.basics.hub import fetched
from oneloop.tasks.language.attention import attend_within_documents
from oneloop.tasks.language.four_bits import in_four_bits, settle_four_bits
from oneloop.tasks.language.lora import LoRA
from oneloop.tasks.transformers_models import auto_model

Architecture = Literal["gpt2", "llama"]


@dataclass(frozen=True)
class Shape:
    """Of a model from scratch."""

    architecture: Architecture
    layers: int
    heads: int
    width: int
    length: int
    """positions"""
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"task.width {self.width} cannot be divided by task.heads {self.heads}")


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
    name: str, *, entries: int, length: int, key: str, lora: LoRA | None = None, **weights: bool
) -> tuple[nn.Module, list[str]]:
    """Load a model of transformers; return it and a line for the log. ``entries`` is the size of its tokenizer,
    ``length`` that of the samples (by ``key``); with ``lora`` it keeps its dtype, or has 4 bits. Raises ValueError if
    it does not fit."""
    options: dict[str, Any] = {} if lora is None else {"dtype": "auto"}
    refuse_quantized(name, lora)
    if lora is not None and lora.quantize is not None:
        options |= in_four_bits(lora.quantize, double_quant=lora.double_quant)
    model, notes = auto_model("AutoModelForCausalLM", name, None, **weights, **options)
    settle_four_bits(model)
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    longest = getattr(config, "max_position_embeddings", None)
    if longest and length > longest:
        raise ValueError(f"task.{key} {length} is longer than the {longest} positions of {name}; lower it")
    if entries > config.vocab_size:
        raise ValueError(
            f"{name}: its tokenizer has {entries:,} entries, and the model {config.vocab_size:,}; it is of another"
            " model, or the embeddings were not resized"
        )
    return model, notes


def refuse_quantized(name: str, lora: LoRA | None) -> None:
    """Raise ValueError if a quantized model would be trained itself or quantized again, or is not of bitsandbytes' 4
    bits."""
    file = fetched(name, "config.json")
    about = json.loads(file.read_text()).get("quantization_config") if file else None
    if not about:
        return
    kind = about.get("bnb_4bit_quant_type") if about.get("load_in_4bit") else None
    if kind is None:
        raise ValueError(
            f"task.model {name!r} is saved quantized ({about.get('quant_method')}), and of such models only those in 4"
            " bits of bitsandbytes can get adapters; name the model it was made from"
        )
    if lora is None:
        raise ValueError(f"task.model {name!r} is in 4 bits ({kind}), which cannot be trained; give task.lora.rank 16")
    if lora.quantize is not None:
        raise ValueError(f"task.lora.quantize {lora.quantize}: {name!r} is in 4 bits ({kind}) already; leave it out")


def made_ready(model: nn.Module, *, packed: bool, router_loss: str) -> bool:
    """Give the model attention within documents if possible; return whether it has that. Raises ValueError if it has
    not and samples are ``packed``, or if its routers have an auxiliary loss."""
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    coefficient = getattr(config, "router_aux_loss_coef", None)
    if coefficient and router_loss == "refuse":
        raise ValueError(
            f"{type(model).__name__} sends tokens to experts, and balances them by an auxiliary loss"
            f" (router_aux_loss_coef {coefficient}) that is a statistic of a whole micro-batch: another split of the"
            " batch would train another model; task.router_loss none leaves it out"
        )
    try:
        attend_within_documents(model, packed=packed)
    except ValueError as error:
        if packed:
            raise ValueError(f"task.pack documents: {error}; task.pack none pads instead") from error
        return False
    return True
