"""A job: all that the loop needs, built from a recipe and checked before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from oneloop.checkpoint.export import load_weights
from oneloop.data.groups import Split, Weighed
from oneloop.data.order import Order, key
from oneloop.duration import Scale
from oneloop.evaluate import higher_is_better, metric_names, prefix
from oneloop.optim.build import build, refuse_if_sharded
from oneloop.optim.schedule import LearningRate, learning_rate
from oneloop.parse import resolve
from oneloop.recipe import Recipe
from oneloop.tasks.base import check, check_sets


@dataclass(frozen=True)
class Job:
    """What one run does, with all durations in steps."""

    recipe: Recipe
    task: Any
    train_set: Any
    eval_sets: dict[str, Any]
    split: Split
    order: Order
    collate: Weighed
    steps: int
    log_every: int
    eval_every: int
    save_every: int
    keep_every: int
    rate: LearningRate
    model: nn.Module
    dtype: torch.dtype
    upward: bool
    """whether a larger eval.best metric is the better one"""
    unit: str
    """what the weight counts: samples or tokens"""

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The recipe's optimizer over the prepared model."""
        chosen = self.recipe.optimizer
        make = resolve("optimizer", chosen.name)
        return build(make, model, lr=chosen.lr, weight_decay=chosen.weight_decay, options=chosen.options)


def build_job(recipe: Recipe, *, ranks: int, sharded: bool = False) -> Job:
    """Builds what the recipe names.

    Raises:
        ValueError: what was asked, what was found, what to do.
    """
    if sharded:
        refuse_if_sharded(resolve("optimizer", recipe.optimizer.name))
    split = Split(recipe.batch.size, ranks, recipe.batch.micro)
    task = resolve("task", recipe.task.name)(**recipe.task.options)
    check(task)
    train_set, eval_sets = task.train_set(), task.eval_sets()
    check_sets(train_set, eval_sets)
    metrics = sorted(
        f"{prefix(name)}/{metric}" for name in eval_sets if name != "test" for metric in metric_names(task)
    )
    if metrics and recipe.eval.best not in metrics:
        raise ValueError(f"eval.best {recipe.eval.best!r} is none of this task's metrics: {', '.join(metrics)}")
    if recipe.debug.overfit:
        train_set = Subset(train_set, range(min(recipe.debug.overfit, len(train_set))))
    unit, sample_weight = getattr(task, "unit", "samples"), getattr(task, "sample_weight", None)
    scale = Scale(split.size, len(train_set), sample_weight if unit == "tokens" else None)
    total = recipe.duration.steps(scale)
    if total < 1:
        raise ValueError(f"duration {recipe.duration} is no step at all; the shortest is 1")
    dtype = getattr(torch, recipe.machine.dtype)
    torch.manual_seed(key(recipe.seed))
    model = task.model().to(dtype)
    if recipe.init.source:
        load_weights(model, recipe.init.source)
    schedule = recipe.schedule
    return Job(
        recipe=recipe,
        task=task,
        train_set=train_set,
        eval_sets=eval_sets,
        split=split,
        order=Order(len(train_set), seed=recipe.seed),
        collate=Weighed(task.collate, task.weight, sample_weight=sample_weight, dtype=dtype),
        steps=1 if recipe.debug.dry_run else total,
        log_every=max(1, recipe.log.every.steps(scale, total=total, key="log.every")),
        eval_every=recipe.eval.every.steps(scale, total=total, key="eval.every"),
        save_every=recipe.save.every.steps(scale, total=total, key="save.every"),
        keep_every=recipe.save.forever.steps(scale, total=total, key="save.forever"),
        rate=learning_rate(resolve("schedule", schedule.name), recipe.optimizer.lr, warmup=schedule.warmup,
                           final=schedule.final, options=schedule.options, scale=scale, total=total),
        model=model,
        dtype=dtype,
        upward=higher_is_better(task, recipe.eval.best),
        unit=unit,
    )  # fmt: skip
