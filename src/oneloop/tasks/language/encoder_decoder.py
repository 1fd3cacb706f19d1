"""Encoder-decoder models: a T5 from scratch, and which models and tokenizers can be used."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from oneloop.tasks.model_limits import config_of
from oneloop.tasks.unread_masks import leave_masks_unread


@dataclass(frozen=True)
class T5Shape:
    """Sizes of a T5 from scratch.

    Args:
        layers: number of blocks of the encoder, and of the decoder.
        heads: number of attention heads.
        width: hidden size.
        dropout: dropout of a model from scratch.
    """

    layers: int = 2
    heads: int = 4
    width: int = 128
    dropout: float = 0.0


def t5_from_scratch(shape: T5Shape, entries: int) -> nn.Module:
    """Return a T5 with random weights.

    Args:
        shape: sizes of the model.
        entries: vocabulary size of :func:`oneloop.tasks.language.tokens.ending_tokenizer`.

    Raises:
        ValueError: the width is not divisible by the heads.
    """
    from transformers import T5Config, T5ForConditionalGeneration

    width, heads = shape.width, shape.heads
    if width % heads:
        raise ValueError(f"task.width {width} is not divisible by task.heads {heads}")
    config = T5Config(
        vocab_size=entries,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=shape.layers,
        num_heads=heads,
        dropout_rate=shape.dropout,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def check_encoder_decoder(name: str, *, trust_remote_code: bool) -> None:
    """Raise ValueError if a model has no encoder and decoder.

    Args:
        name: a folder saved by transformers, or ``hf:ID[@REVISION]``.
        trust_remote_code: run Python code stored with the weights.
    """
    config = config_of(name, trust_remote_code=trust_remote_code, whole=True)
    if not getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"task.model {name!r} is not an encoder-decoder model ({config.model_type}); use "
            "--task causal_lm or sft for a decoder, text_classification for an encoder"
        )


def check_tokenizer(name: str, tokenizer: Any) -> None:
    """Raise ValueError if a tokenizer lacks tokens, or needs to know the languages.

    Args:
        name: of its model, for messages.
        tokenizer: a tokenizer of transformers.
    """
    for role in ("pad_token", "eos_token"):
        if getattr(tokenizer, role) is None:
            raise ValueError(
                f"task.model {name!r}: its tokenizer has no {role}; set one, and save it next to "
                "the weights"
            )
    if hasattr(tokenizer, "src_lang") or hasattr(tokenizer, "tgt_lang"):
        raise ValueError(
            f"task.model {name!r}: its tokenizer ({type(tokenizer).__name__}) needs the languages "
            "of source and target, which this task cannot set; use a model of one pair of languages"
        )


def prepared(model: Any, name: str | None) -> tuple[int, int]:
    """Return the tokens with which the decoder of a model starts, and with which it is padded.

    The model no longer reads masks on the host.

    Args:
        model: a model of transformers.
        name: for the message.

    Raises:
        ValueError: its configuration lacks one of them.
    """
    config = model.config
    for key in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, key, None) is None:
            raise ValueError(
                f"task.model {name!r}: its config.json has no {key}, with which the decoder "
                "starts; add it"
            )
    leave_masks_unread(model)
    return int(config.decoder_start_token_id), int(config.pad_token_id)
