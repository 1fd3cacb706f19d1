"""The learning rate of a recipe: its peak, scaled by the batch size, and its schedule."""

from oneloop.basics.duration import Scale
from oneloop.basics.exit_codes import BadInput
from oneloop.optim.schedule import MOMENTUM_KEYS, LearningRate, learning_rate
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import OptimizerConfig, Recipe


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

    # A momentum of 0 stands for none.
    optimizer = recipe.optimizer
    has_momentum = any(optimizer.options.get(key) for key in MOMENTUM_KEYS)
    if "momentum" in rate.scheduled and not has_momentum:
        raise BadInput(
            f"schedule.name {schedule.name} changes the optimizer's momentum, and optimizer.name "
            f"{optimizer.name} has none (no momentum above 0, no betas); set one, choose another "
            "optimizer, or set --schedule.cycle_momentum false"
        )
    return rate


def peak(optimizer: OptimizerConfig, batch: int) -> float:
    """Return the peak learning rate for a batch size.

    For SGD, it grows linearly with the batch (Goyal et al. 2017), for all others with its square
    root (Malladi et al. 2022)."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = 1.0 if optimizer.name in ("sgd", "torch.optim.SGD") else 0.5
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)
