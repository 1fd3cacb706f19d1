"""What in a model would be another for another split of the batch: dropout, and statistics of the batch."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import nn

from oneloop.basics.seeds import key

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUT = (nn.modules.dropout._DropoutNd,)


def reseed(device: torch.device, *numbers: int, others: bool = False) -> None:
    """Makes what is random in the model a function of these numbers. About a microsecond; ten with ``others``, which
    seeds Python's and numpy's generators too."""
    number = key(*numbers)
    if others:
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    elif device.type != "cpu":
        torch.manual_seed(number)


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether the model has BatchNorm that is not frozen in eval mode."""
    return any(isinstance(module, _BATCH_STATISTICS) and module.training for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random numbers in training: a dropout layer, or an attention dropout in its config."""
    config = getattr(model, "config", None)
    rates = [getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")]
    return any(isinstance(m, _DROPOUT) and m.p > 0 for m in model.modules()) or any(rate for rate in rates if rate)
