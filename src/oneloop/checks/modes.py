"""Modes of a model in which it draws no random numbers, so that its samples can be compared."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from oneloop.basics.tensors import reshard
from oneloop.machine.blocks import has_batch_statistics

_OWN = "in training"
_INSIDE = "with dropout and BatchNorm in eval mode"  # but the loss sees a model in training mode
_EVAL = "in eval mode"


@contextmanager
def without_draws(
    model: nn.Module, root: nn.Module, compute: Callable[[], Any], known: Any = None
) -> Iterator[tuple[Any, str]]:
    """Put a model into the first mode without random numbers and statistics of BatchNorm.

    Args:
        model: as the loss gets it.
        root: the model without a wrapper.
        compute: runs the model after it has set seeds; its result has ``draws``.
        known: the result in the model's own mode, if known.

    Yields:
        The result in this mode, and the mode in words. None: random numbers are always drawn.
    """
    for words in (_OWN, _INSIDE, _EVAL):
        with _mode(model, root, words):
            if not has_batch_statistics(model):
                result = known or compute()
                if not result.draws:
                    yield result, words
                    return
        known = None
    yield None, ""


@contextmanager
def _mode(model: nn.Module, root: nn.Module, words: str) -> Iterator[None]:
    """Put a model into a mode, with gradients."""
    modes = {module: module.training for module in model.modules()}
    cudnn = torch.backends.cudnn.enabled
    handles: list[Any] = []
    if words != _OWN:
        model.eval()
        torch.backends.cudnn.enabled = False  # its recurrent layers have no backward in eval mode
    if words == _INSIDE:
        enter = partial(_set_mode, False)
        leave = partial(_set_mode, modes[root])
        handles.append(root.register_forward_pre_hook(enter))
        handles.append(root.register_forward_hook(leave, always_call=True))
        model.training = root.training = modes[root]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        torch.backends.cudnn.enabled = cudnn
        for module, mode in modes.items():
            module.training = mode
        reshard(model)


def _set_mode(training: bool, module: nn.Module, *_: object) -> None:
    module.training = training
