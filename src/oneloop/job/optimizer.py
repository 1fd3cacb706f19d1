"""The optimizer of a recipe."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from oneloop.checkpoint.optimizer_trial import NotTried, Tried, try_optimizer
from oneloop.job.model import BuiltModel
from oneloop.optim.optimizers import build, muon
from oneloop.optim.schedule import LearningRate
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import Recipe

__all__ = ["Tried", "optimizer_of"]


def optimizer_of(
    recipe: Recipe, built: BuiltModel, rate: LearningRate
) -> tuple[Callable[[nn.Module], Optimizer], Tried]:
    """Return what builds the recipe's optimizer for a prepared model, and the result of its trial.

    Raise ValueError if the optimizer cannot be used.
    """
    config = recipe.optimizer
    kind = resolve("optimizer", config.name)
    make = partial(
        build,
        kind,
        lr=config.lr,
        weight_decay=config.weight_decay,
        options=config.options,
        settings=built.settings,
        elementwise=recipe.batch.grain is not None,
    )
    try:
        tried = try_optimizer(make, torch.zeros(()), rate.scheduled)
    except NotTried as error:
        # One that works with its own model only may not know a small one.
        if "model" in inspect.signature(kind).parameters and kind is not muon:
            return make, Tried(notes=[str(error)])
        given = "".join(f" {key}={value!r}" for key, value in config.options.items())
        raise ValueError(
            f"optimizer.name {config.name}{given} cannot be used: {error.__cause__}; correct its "
            "options, or choose another optimizer (one that needs a closure, which computes the "
            "loss again, is not supported)"
        ) from error
    return make, tried
