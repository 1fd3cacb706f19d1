"""The learning rate of a recipe: its peak, scaled by the batch size, and its schedule."""

import inspect
from typing import Any

from oneloop.basics.duration import Scale
from oneloop.basics.exit_codes import BadInput
from oneloop.optim.schedule import MOMENTUM_KEYS, LearningRate, learning_rate
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import Recipe
from oneloop.recipe.training_keys import OptimizerConfig


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
        _reject_other_momentum(recipe.optimizer, rate)
    return rate


def _reject_other_momentum(optimizer: OptimizerConfig, rate: LearningRate) -> None:
    """Raise BadInput if a schedule cannot change the momentum, or if the recipe sets it, too."""
    advice = "or set --schedule.cycle_momentum false"
    given: dict[str, Any] = {}
    for key in MOMENTUM_KEYS:
        if optimizer.options.get(key):
            given[key] = optimizer.options[key]
    if not given:
        raise BadInput(
            "schedule.name onecycle changes the optimizer's momentum, and optimizer.name "
            f"{optimizer.name} has none (no momentum above 0, no betas); set one, choose another "
            f"optimizer, {advice}"
        )

    # The schedule replaces what the recipe sets.
    begins = rate.momentum(0)
    arguments = inspect.signature(resolve("optimizer", optimizer.name)).parameters
    for key, value in given.items():
        usual = arguments[key].default if key in arguments else None
        first = value
        if key == "betas":
            first = value[0]
            usual = usual[0] if isinstance(usual, list | tuple) else None
        if first not in (usual, begins):
            raise BadInput(
                f"optimizer.{key} {value} has no effect with schedule.name onecycle, which sets "
                f"the momentum, at first to {begins}; set that value, {advice}"
            )


def peak(optimizer: OptimizerConfig, batch: int) -> float:
    """Return the peak learning rate for a batch size.

    It grows linearly with the batch (Goyal et al. 2017), or with its square root (Malladi et al.
    2022)."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[optimizer.lr_rule]
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)
