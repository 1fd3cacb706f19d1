"""What in a model would be another for another split of the batch: dropout, and statistics of the batch."""

from __future__ import annotations

from torch import nn

_BATCH_STATISTICS = (nn.modules.batchnorm._BatchNorm,)
_DROPOUT = (nn.modules.dropout._DropoutNd,)


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether the model has BatchNorm that is not frozen in eval mode."""
    return any(isinstance(module, _BATCH_STATISTICS) and module.training for module in model.modules())


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random numbers in training: a dropout layer, or an attention dropout in its config."""
    config = getattr(model, "config", None)
    rates = [getattr(config, name, 0.0) for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")]
    return any(isinstance(m, _DROPOUT) and m.p > 0 for m in model.modules()) or any(rate for rate in rates if rate)
