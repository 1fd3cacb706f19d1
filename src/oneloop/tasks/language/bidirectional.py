"""Attention in both directions within documents of a row, for encoders of transformers.

>>> check_apart(model, tokens)
>>> model(input_ids=…, position_ids=…, attention_mask=apart(documents))
"""

import torch
from torch import Tensor, nn

from oneloop.tasks.language.attention import logits_of, near
from oneloop.tasks.model_limits import first_position


def apart(documents: Tensor) -> Tensor:
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
    start = len(tokens) // 2  # of the second document
    row = tokens[None]
    first = row[:, :start]
    second = row[:, start:]

    def logits(row: Tensor, start: int) -> Tensor:
        numbers = torch.arange(row.shape[1])
        documents = (numbers >= start)[None]
        positions = torch.where(documents, numbers - start, numbers) + first_position(model)[0]
        return logits_of(model, row, attention_mask=apart(documents), position_ids=positions)

    try:
        # Attention to a window of the row differs from that with a mask of the whole row.
        same = near(logits(row, 0), logits_of(model, row))
        both = logits(row, start)
        other = logits(torch.cat([first.flip(1), second], dim=1), start)
    except Exception as error:
        raise ValueError(f"{name} does not take masks of documents: {error}") from error
    alone = torch.cat([logits_of(model, first), logits_of(model, second)], dim=1)
    if not same or not near(both, alone):
        raise ValueError(f"{name}: the logits of a packed document differ from those alone")
    if not near(both[:, start:], other[:, start:], 2e-6):
        raise ValueError(f"{name}: its layers carry state from one document to the next")


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
