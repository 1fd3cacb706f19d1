"""Attention in both directions within documents of a row, for encoders of transformers.

>>> check_apart(model, tokens)
>>> model(input_ids=…, position_ids=…, attention_mask=document_mask(documents))
"""

import torch
from torch import Tensor, nn

from oneloop.tasks.language.attention import check_documents, logits_of, near
from oneloop.tasks.model_limits import first_position


def document_mask(documents: Tensor) -> Tensor:
    """Return a mask with which no document attends to another.

    Its shape (rows, 1, positions, positions) makes transformers pass it on without reading it on
    the host (no sync).

    Args:
        documents: the document number of each position, shape (rows, positions); padding is a
            separate document.
    """
    return documents[:, None, :, None] == documents[:, None, None, :]


def check_apart(model: nn.Module, tokens: Tensor) -> None:
    """Raise ValueError if documents of a row do not get the logits that they get alone.

    Args:
        model: a model of transformers with a head for masked tokens.
        tokens: as many ordinary tokens as a row has, shape (positions,).
    """
    name = type(model).__name__
    row = tokens[None]
    try:
        # Attention to a window of the row differs from that with a mask of the whole row.
        masked = logits_of(model, row, attention_mask=document_mask(torch.zeros_like(row)))
        if not near(masked, logits_of(model, row)):
            raise ValueError(f"{name}: its logits differ with a mask of the whole row")
        check_documents(model, row, document_mask, first=first_position(model)[0])
    except Exception as error:
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{name} does not take masks of documents: {error}") from error


def check_both_directions(model: nn.Module, tokens: Tensor) -> None:
    """Raise ValueError if a model does not attend to later tokens.

    Args:
        model: a model of transformers with a head for masked tokens.
        tokens: ordinary tokens, shape (positions,).
    """
    start = len(tokens) // 2
    row = tokens[None]
    alone = logits_of(model, row[:, :start])
    if near(alone, logits_of(model, row)[:, :start], 2e-6):
        raise ValueError(
            f"{type(model).__name__} does not attend to later tokens, so it cannot predict masked "
            "ones; use an encoder (is_decoder false), or the task causal_lm"
        )
