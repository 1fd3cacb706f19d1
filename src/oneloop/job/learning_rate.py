"""The learning rate of a recipe: its peak, scaled by the batch size, and its schedule."""

from oneloop.basics.duration import Scale
from oneloop.optim.schedule import LearningRate, learning_rate
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
    return learning_rate(
        resolve("schedule", schedule.name),
        peak(recipe.optimizer, recipe.batch.size),
        warmup=schedule.warmup,
        final=schedule.final,
        options=schedule.options,
        scale=scale,
        total=total,
    )


def peak(optimizer: OptimizerConfig, batch: int) -> float:
    """Return the peak learning rate for a batch size.

    It grows linearly with the batch (Goyal et al. 2017), or with its square root (Malladi et al.
    2022)."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[optimizer.lr_rule]
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)
