"""One pass of a model in eval mode, which leaves the model as it was."""

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def probe(model: Any, tokens: Tensor, **inputs: Any) -> Any:
    """Return the outputs of a model in eval mode, and restore the mode of each module.

    Args:
        model: a model of transformers.
        tokens: rows of tokens.
        inputs: more inputs of the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        return model(input_ids=tokens, **inputs)
    finally:
        for module, training in modes:
            module.training = training
