"""Modes of a model in which it draws no random numbers, so that its samples can be compared."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.backends import cudnn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensors import reshard
from oneloop.checks.dry_run import DryRun
from oneloop.evaluation import evaluating
from oneloop.machine.blocks import has_batch_statistics

_OWN = "in training"
_INSIDE = "with dropout and BatchNorm in eval mode"  # but the loss sees a model in training mode
_EVAL = "in eval mode"


@contextmanager
def without_draws(
    dry: DryRun, compute: Callable[[], Any], known: Any = None
) -> Iterator[tuple[Any, str]]:
    """Put the model into the first mode without random numbers and statistics of BatchNorm.

    Args:
        dry: the dry run.
        compute: runs the model on a batch.
        known: the result in the model's own mode, if known.

    Yields:
        The result in this mode, and the mode in words. None: random numbers are always drawn, or
        the loss cannot be computed in eval mode.
    """
    model = dry.model
    root = dry.root
    training = root.training
    for words in (_OWN, _INSIDE, _EVAL):
        if words == _OWN and (dry.draws or has_batch_statistics(root)):
            continue
        with ExitStack() as mode:
            mode.callback(reshard, root)
            if words != _OWN:
                known = None
                mode.enter_context(evaluating(model))
                mode.enter_context(torch.enable_grad())
                # Its recurrent layers have no backward in eval mode.
                mode.callback(setattr, cudnn, "enabled", cudnn.enabled)
                cudnn.enabled = False
            if words == _INSIDE:
                model.training = root.training = training
                enter = partial(_set_mode, False)
                leave = partial(_set_mode, training)
                mode.callback(root.register_forward_pre_hook(enter).remove)
                mode.callback(root.register_forward_hook(leave, always_call=True).remove)
            try:
                result = known or compute()
            except BadInput:  # the loss may need a model in training mode
                if words == _OWN:
                    raise
                continue
            if known or not dry.drew():
                yield result, words
                return
    yield None, ""


def _set_mode(training: bool, module: nn.Module, *_: object) -> None:
    module.training = training
