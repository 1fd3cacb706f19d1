"""What a model of transformers can take: tokens of its vocabulary, and positions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from oneloop.basics.base_models import place_of


@contextmanager
def loading(problem: str) -> Iterator[None]:
    """Raise ValueError, which begins with ``problem``, if transformers cannot load something."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(f"{problem}: {' '.join(str(error).split())}") from error


def config_of(name: str, *, trust_remote_code: bool = False, whole: bool = False) -> Any:
    """Return the text configuration of a model. Raise ValueError if it cannot be loaded.

    Args:
        name: a folder saved by transformers, or ``hf:ID[@REVISION]``.
        trust_remote_code: run Python code stored with the weights.
        whole: return the configuration of the whole model, which may be of several models.
    """
    from transformers import AutoConfig

    path, revision = place_of(name)
    with loading(f"task.model {name!r} cannot be loaded"):
        config = AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    return config if whole else config.get_text_config()


def first_position(model: nn.Module) -> tuple[int, int | None]:
    """Return the number of a text's first position, and the size of the table of positions.

    RoBERTa and its relatives number positions from ``padding_idx + 1``. Other models number them
    from 0; for them the size is None.
    """
    for name, module in model.named_modules():
        # I-BERT has its own class of embeddings.
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and isinstance(padding, int):
            weight: Any = module.weight
            return padding + 1, len(weight)
    return 0, None


def positions_of(model: nn.Module) -> int | None:
    """Return the number of positions of a model, in tokens; None if it has no limit.

    RoBERTa and its relatives have fewer than ``max_position_embeddings``.
    """
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    limit = getattr(config, "max_position_embeddings", None)
    first, size = first_position(model)
    if size is not None:
        return size - first
    return limit if isinstance(limit, int) and limit > 0 else None


def shorter_length(
    name: str, length: int, *, key: str, trust_remote_code: bool = False
) -> tuple[int, list[str]]:
    """Return a length for which a model has positions, and a line for the log if it is shorter.

    Args:
        name: a folder saved by transformers, or ``hf:ID[@REVISION]``.
        length: the default number of tokens.
        key: task key of the length, for the line.
        trust_remote_code: run Python code stored with the weights.
    """
    from transformers import AutoModel

    # One layer without memory shows how the model numbers positions.
    config = config_of(name, trust_remote_code=trust_remote_code)
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = 1
    try:
        with torch.device("meta"):
            model = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    except Exception:  # of the model's code; its positions are checked once it is loaded
        return length, []
    limit = positions_of(model)
    if limit is None or limit >= length:
        return length, []
    return limit, [f"task.{key} is {limit}, not {length}: {name} has {limit} positions"]


def check_sizes(model: nn.Module, name: str, *, entries: int, length: int, key: str) -> None:
    """Raise ValueError if a model has too few positions, or a vocabulary below its tokenizer's.

    Args:
        model: a model of transformers.
        name: its name in messages.
        entries: vocabulary size of the tokenizer.
        length: tokens per sample.
        key: task key of the length, for the message.
    """
    limit = positions_of(model)
    if limit and length > limit:
        raise ValueError(f"task.{key} {length} exceeds the {limit} positions of {name}; lower it")
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary and entries > vocabulary:
        raise ValueError(
            f"{name}: its tokenizer has {entries:,} entries, and the model {vocabulary:,}; it "
            "belongs to another model, or the embeddings were not resized"
        )


def padding_token(config: Any, tokenizer: Any) -> int | None:
    """Return the token for padding: the model's, else the tokenizer's, else its end token.

    A model finds the last token of a text, and the positions, by its own padding token.

    Args:
        config: the model's configuration.
        tokenizer: its tokenizer.
    """
    own = config.pad_token_id
    if isinstance(own, int) and 0 <= own < (getattr(config, "vocab_size", None) or 0):
        return own
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return None if tokenizer.eos_token_id is None else int(tokenizer.eos_token_id)
