"""The optimizer of a recipe."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.optim import Optimizer

from oneloop.job.model import BuiltModel
from oneloop.launch.agreement import where
from oneloop.optim.optimizers import build, try_optimizer
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import Recipe


def optimizer_of(
    recipe: Recipe, built: BuiltModel
) -> tuple[Callable[[nn.Module], Optimizer], float]:
    """Return what builds the recipe's optimizer for a prepared model, after a trial.

    Also return the bytes of its state per byte of parameters, approximately. Raise ValueError if
    the optimizer cannot be used.
    """
    config = recipe.optimizer
    share = try_optimizer(resolve("optimizer", config.name), config.name, config.options)
    return partial(_make_optimizer, recipe, built), share


def _make_optimizer(recipe: Recipe, built: BuiltModel, model: nn.Module) -> Optimizer:
    config = recipe.optimizer
    try:
        return build(
            resolve("optimizer", config.name),
            model,
            lr=config.lr,
            weight_decay=config.weight_decay,
            options=config.options,
            settings=built.settings,
            elementwise=recipe.batch.grain is not None,
        )
    except Exception as error:
        raise ValueError(
            f"optimizer.name {config.name} cannot be built: {error}{where(error)}"
        ) from error
