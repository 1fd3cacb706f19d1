"""The learning rate of a recipe: its peak, scaled by the batch size, and its schedule."""

import inspect

from oneloop.basics.duration import Scale
from oneloop.basics.exit_codes import BadInput
from oneloop.optim.schedule import LearningRate, learning_rate
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import Recipe
from oneloop.recipe.training_keys import OptimizerConfig

_MOMENTA = ("momentum", "betas")  # options of optimizers


def rate_of(recipe: Recipe, scale: Scale, total: int) -> LearningRate:
    """Return the learning rate of a recipe by step.

    Args:
        recipe: its groups optimizer, batch and schedule apply.
        scale: of its durations.
        total: steps of the run.
    """
    schedule = recipe.schedule
    rate = learning_rate(
        resolve("schedule", schedule.name),
        peak(recipe.optimizer, recipe.batch.size),
        warmup=schedule.warmup,
        warmup_start=schedule.warmup_start,
        warmup_offset=schedule.warmup_offset,
        length=schedule.length,
        final=schedule.final,
        options=schedule.options,
        scale=scale,
        total=total,
    )
    if rate.cycles_momentum:
        _reject_other_momentum(recipe.optimizer)
    return rate


def _reject_other_momentum(optimizer: OptimizerConfig) -> None:
    """Raise BadInput if a schedule cannot change the momentum, or if the recipe sets it, too."""
    advice = "or set --schedule.cycle_momentum false"
    given = {key: optimizer.options[key] for key in _MOMENTA if key in optimizer.options}
    if not given:
        raise BadInput(
            "schedule.name onecycle changes the optimizer's momentum, and optimizer.name "
            f"{optimizer.name} has no momentum or betas; choose another optimizer, {advice}"
        )
    arguments = inspect.signature(resolve("optimizer", optimizer.name)).parameters
    for key, value in given.items():
        usual = arguments[key].default
        first, usual_first = (value[0], usual[0]) if key == "betas" else (value, usual)
        if key == "momentum" and not value and "betas" not in given:
            raise BadInput(
                "schedule.name onecycle changes the optimizer's momentum, and "
                f"optimizer.momentum {value} means none; set it above 0, {advice}"
            )
        if first != usual_first and usual:
            raise BadInput(
                f"optimizer.{key} {value} has no effect with schedule.name onecycle, which sets "
                f"the momentum from schedule.base_momentum to max_momentum; remove it, {advice}"
            )


def peak(optimizer: OptimizerConfig, batch: int) -> float:
    """Return the peak learning rate for a batch size.

    It grows linearly with the batch (Goyal et al. 2017), or with its square root (Malladi et al.
    2022)."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[optimizer.lr_rule]
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)
