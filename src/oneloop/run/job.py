"""A job: what a recipe builds, as plain data; :func:`oneloop.run.build.build_job` makes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from oneloop.basics.duration import is_time
from oneloop.data.groups import Weighed
from oneloop.data.order import Ordered
from oneloop.data.split import Split
from oneloop.optim.policy import Policy
from oneloop.optim.schedule import LearningRate
from oneloop.recipe.schema import Recipe
from oneloop.run.model import BuiltModel, torch_dtype
from oneloop.tasks.base import Task


@dataclass(frozen=True)
class Rhythm:
    """Steps between two of each kind: log, eval and save; check and collect where they are wanted."""

    every: Mapping[str, int]
    total: int  # steps of the run: at the last one all is due
    forever: int = 0  # steps between two checkpoints that are never deleted (0: none)

    def due(self, step: int) -> list[str]:
        """What is due after this step, in the order in which it is done."""
        return [name for name, every in self.every.items() if is_time(step, every, self.total)]

    def is_due(self, name: str, step: int) -> bool:
        return is_time(step, self.every[name], self.total)

    def __contains__(self, name: str) -> bool:
        return name in self.every


@dataclass(frozen=True)
class Job:
    """What one run trains, with all durations in steps."""

    recipe: Recipe
    task: Task
    train_set: Any
    eval_sets: dict[str, Any]
    built: BuiltModel
    make_optimizer: Callable[[nn.Module], Optimizer]  # the recipe's optimizer over a prepared model
    optimizer_share: float  # bytes of the optimizer's state for each byte of the parameters, about
    emas: list[dict[str, Any]]  # arguments of each EMA, except model and optimizer
    split: Split
    order: Ordered
    collate: Weighed
    rhythm: Rhythm
    rate: LearningRate
    upward: bool  # whether a larger eval.best metric is better
    no_noise_scale: str | None  # why the noise scale cannot be measured

    @property
    def model(self) -> nn.Module:
        return self.built.model

    @property
    def sets(self) -> dict[str, Any]:
        """All data sets by name."""
        return {"train": self.train_set, **self.eval_sets}

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.rhythm.total

    @property
    def unit(self) -> str:
        """What the weight counts: samples or tokens."""
        return getattr(self.task, "unit", "samples")

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.recipe)

    @property
    def exact(self) -> bool:
        """Whether the run must be bit-identical on every parallel layout (``batch.grain``)."""
        return self.split.grain is not None

    @property
    def noise_scale(self) -> bool:
        """Whether it is measured."""
        return self.recipe.log.noise_scale and self.no_noise_scale is None

    @property
    def policy(self) -> Policy:
        guard = self.recipe.guard
        return Policy(guard.nonfinite, guard.spike, guard.sigma, guard.window)
