"""A BERT encoder on bytes, for tasks that read texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

PAD = 256
"""beside the bytes"""


class Encoder(nn.Module):
    """Averaged over the text, and a linear head: (texts, bytes) -> (texts, outputs)."""

    _no_split_modules = ("BertLayer",)

    def __init__(self, outputs: int, *, layers: int, heads: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        if width % heads:
            raise ValueError(f"task.width {width} cannot be divided by task.heads {heads}")
        config = BertConfig(
            vocab_size=257,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=length,
            pad_token_id=PAD,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        self.encoder = BertModel(config, add_pooling_layer=False)
        self.head = nn.Linear(width, outputs)

    def hidden(self, text: Tensor, known: Tensor) -> Tensor:
        """(texts, bytes, width), of the bytes that are no padding."""
        # Ready and 4-D (batch, 1, query, key): transformers would ask a 2-D mask whether it hides anything.
        mask = known[:, None, None, :].expand(-1, 1, text.shape[1], -1)
        hidden: Tensor = self.encoder(input_ids=text, attention_mask=mask).last_hidden_state
        return hidden

    def forward(self, text: Tensor) -> Tensor:
        known = text != PAD
        hidden = self.hidden(text, known)
        share = known[:, :, None].to(hidden.dtype)
        return self.head((hidden * share).sum(1) / share.sum(1))  # type: ignore[no-any-return]


class ByteEncoder(Encoder):
    """The head at every byte: (texts, bytes) -> (texts, bytes, outputs)."""

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.hidden(text, text != PAD))  # type: ignore[no-any-return]


def as_bytes(text: str, length: int) -> Tensor:
    """The first so many bytes of a text; of an empty one, one that occurs in no text."""
    return torch.tensor(list(text.encode()[:length]) or [PAD - 1])


def padded(texts: list[Any]) -> Tensor:
    """Texts of one batch, as long as the longest."""
    return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=PAD)
