"""A job: all that the loop needs, built from a recipe and checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from oneloop import recipe as recipes
from oneloop.checkpoint.export import load_weights
from oneloop.data.groups import Keyed, Split, Weighed
from oneloop.data.order import Order, key
from oneloop.duration import Scale
from oneloop.ema import EMA, gamma
from oneloop.memory.blocks import blocks, class_names
from oneloop.memory.compile import compile_
from oneloop.memory.recompute import parsed, recompute
from oneloop.memory.switches import channels_last
from oneloop.metrics import higher_is_better, metric_names, prefix
from oneloop.optim.build import build, refuse_if_sharded
from oneloop.optim.noise_scale import Sensor
from oneloop.optim.policy import Policy
from oneloop.optim.schedule import LearningRate, learning_rate
from oneloop.parse import resolve
from oneloop.recipe import Recipe
from oneloop.runtime import has_batch_statistics
from oneloop.tasks.base import check, check_sets
from oneloop.watch.graph import model_graph
from oneloop.watch.throughput import training_flops


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
    rhythm: dict[str, int]
    """steps between two of each kind of rare work: log, eval, save; check and collect where they are wanted"""
    keep_every: int
    policy: Policy
    noise_scale: bool
    no_noise_scale: str | None
    """why it cannot be measured"""
    rate: LearningRate
    averages: list[dict[str, Any]]
    """arguments of each EMA"""
    model: nn.Module
    blocks: list[str]
    """class names of the model's blocks"""
    flops: float
    """floating-point operations of training on one sample (0: not known)"""
    notes: list[str]
    """how the model runs, for a person to read at the start"""
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

    def graph(self) -> Any:
        """The model's operations on one sample, for TensorBoard."""
        sample = Keyed(self.train_set, seed=0)[0, 0]
        return model_graph(self.task.model, self.task.loss, self.collate([sample])[0])

    def emas(self, model: nn.Module, optimizer: Optimizer) -> list[EMA]:
        """The recipe's averages of the prepared model."""
        ema = self.recipe.ema
        return [EMA(model, every=ema.every, ramp=ema.ramp, device=ema.device, optimizer=optimizer, **one)
                for one in self.averages]  # fmt: skip


def build_job(recipe: Recipe, *, ranks: int, sharded: bool = False, device: str = "cpu",
              micro: int | None = None) -> Job:  # fmt: skip
    """Builds what the recipe names.

    Args:
        recipe: as read.
        ranks: processes.
        sharded: whether FSDP2 shards the model.
        device: type of the device.
        micro: what was found for a ``batch.micro`` that is no number.

    Raises:
        ValueError: what was asked, what was found, what to do.
    """
    if sharded:
        refuse_if_sharded(resolve("optimizer", recipe.optimizer.name))
    split = Split(recipe.batch.size, ranks, recipe.batch.micro if isinstance(recipe.batch.micro, int) else micro)
    task = resolve("task", recipe.task.name)(**recipe.task.options)
    check(task)
    train_set, eval_sets = task.train_set(), task.eval_sets()
    check_sets(train_set, eval_sets)
    if recipe.debug.overfit:
        train_set = Subset(train_set, range(min(recipe.debug.overfit, len(train_set))))
    unit, sample_weight = getattr(task, "unit", "samples"), getattr(task, "sample_weight", None)
    scale = Scale(split.size, len(train_set), sample_weight if unit == "tokens" else None)
    total = recipe.duration.steps(scale)
    averages = _averages(recipe, scale, total)
    _check_best(recipe.eval.best, task, eval_sets, [average["name"] for average in averages])
    if total < 1:
        raise ValueError(f"duration {recipe.duration} is no step at all; the shortest is 1")
    dtype = getattr(torch, recipe.machine.dtype)
    torch.manual_seed(key(recipe.seed))
    model = task.model().to(dtype)
    if recipe.init.source:
        load_weights(model, recipe.init.source, recipe.init.weights)
    collate = Weighed(task.collate, task.weight, sample_weight=sample_weight, dtype=dtype)
    flops, unknown = _flops(task, train_set, collate)
    model_blocks, notes = _arranged(model, recipe, sharded=sharded, device=device)
    _check_model(recipe, model, split)
    if unknown:
        notes.append(f"MFU n/a: the model's operations cannot be counted without running it ({unknown})")
    schedule = recipe.schedule
    no_noise_scale = Sensor.why_not(ranks, split.accumulate, sharded=sharded)
    return Job(
        recipe=recipe,
        task=task,
        train_set=train_set,
        eval_sets=eval_sets,
        split=split,
        order=Order(len(train_set), seed=recipe.seed),
        collate=collate,
        steps=1 if recipe.debug.dry_run else total,
        rhythm=_rhythm(recipe, scale, total),
        policy=Policy(recipe.guard.nonfinite, recipe.guard.spike, recipe.guard.sigma, recipe.guard.window),
        noise_scale=recipe.log.noise_scale and no_noise_scale is None,
        no_noise_scale=no_noise_scale,
        keep_every=recipe.save.forever.steps(scale, total=total, key="save.forever"),
        averages=averages,
        blocks=model_blocks,
        flops=flops,
        notes=notes,
        rate=learning_rate(resolve("schedule", schedule.name), peak(recipe.optimizer, split.size), warmup=schedule.warmup,
                           final=schedule.final, options=schedule.options, scale=scale, total=total),
        model=model,
        dtype=dtype,
        upward=higher_is_better(task, recipe.eval.best),
        unit=unit,
    )  # fmt: skip


def _check_best(best: str, task: Any, eval_sets: Iterable[str], averages: Iterable[str]) -> None:
    """Refuses an ``eval.best`` that no evaluation finds."""
    metrics = sorted(
        f"{prefix(name)}/{metric}" for name in eval_sets if name != "test" for metric in metric_names(task)
    )
    metrics += [f"{average}/{metric}" for average in averages for metric in metrics]
    if metrics and best not in metrics:
        raise ValueError(f"eval.best {best!r} is none of this task's metrics: {', '.join(metrics)}")


def _check_model(recipe: Recipe, model: nn.Module, split: Split) -> None:
    """Refuses what would not be exact with this model and this split."""
    skips = "skip" in (recipe.guard.nonfinite, recipe.guard.spike if recipe.guard.sigma else "")
    if skips and has_batch_statistics(model):
        raise ValueError("guard skip is asked for, and the model has BatchNorm, whose running statistics take in a bad batch"
                         " before it is known to be bad; set guard.nonfinite and guard.spike to rewind or stop")  # fmt: skip
    graphs = recipe.machine.compile != "none" and recipe.machine.compile_mode in ("reduce-overhead", "max-autotune")
    if graphs and split.accumulate > 1:
        raise ValueError(f"machine.compile_mode {recipe.machine.compile_mode} is asked for with {split.accumulate} micro-batches a"
                         " step: CUDA graphs reuse memory in which gradients of the last one may lie; set max-autotune-no-cudagraphs"
                         " or default, or batch.micro to the whole share of a process")  # fmt: skip


def _rhythm(recipe: Recipe, scale: Scale, total: int) -> dict[str, int]:
    """Steps between two of each kind of rare work."""
    durations = {"log": (recipe.log.every, "log.every"), "eval": (recipe.eval.every, "eval.every"),
                 "save": (recipe.save.every, "save.every"), "check": (recipe.machine.check_every, "machine.check_every"),
                 "collect": (recipe.machine.gc_every, "machine.gc_every")}  # fmt: skip
    rhythm = {name: every.steps(scale, total=total, key=key) for name, (every, key) in durations.items()
              if every.amount or name not in ("check", "collect")}  # fmt: skip
    return rhythm | {"log": max(1, rhythm["log"])}


def peak(optimizer: recipes.Optimizer, batch: int) -> float:
    """The peak learning rate at this global batch: linear (Goyal et al. 2017) or sqrt (Malladi et al. 2022) scaling."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[optimizer.lr_rule]
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)


def _flops(task: Any, train_set: Any, collate: Weighed) -> tuple[float, str | None]:
    """Operations of training on a sample (the mean of a few, where they differ), and why they are not known."""
    samples = Keyed(train_set, seed=0)
    number = 1 if collate.sample_weight is not None else min(4, len(train_set))
    try:
        found = [training_flops(task.model, task.loss, collate([samples[0, index]])[0]) for index in range(number)]
    except Exception as error:  # a model that cannot be built or run without values is no worse for that
        return 0.0, f"{type(error).__name__}: {error}".splitlines()[0]
    return sum(found) / number, None


def _averages(recipe: Recipe, scale: Scale, total: int) -> list[dict[str, Any]]:
    """Arguments of each EMA, named after what it is where there are several."""
    ema = recipe.ema
    found: list[dict[str, Any]] = [
        {"half_life": one.samples(scale, total=total, key="ema.half_life"), "name": f"ema-{one.text.replace(' ', '')}"}
        for one in ema.half_lives
    ]
    found += [{"decay": ema.decay, "name": f"ema-{ema.decay}"}] if ema.decay else []
    found += [{"power": one, "name": f"ema-power-{one}"} for one in ema.power]
    for one in ema.power:
        gamma(one)  # refuses what is too wide
    if len(found) == 1 and not ema.power:
        found[0]["name"] = "ema"
    names = [one["name"] for one in found]
    if len(set(names)) < len(names):
        raise ValueError(f"ema: two averages are the same, of {', '.join(names)}; give each once")
    return found


def _arranged(model: nn.Module, recipe: Recipe, *, sharded: bool, device: str) -> tuple[list[str], list[str]]:
    """Lays the model out as ``machine`` says, in place; class names of its blocks, and what to tell a person."""
    machine, notes = recipe.machine, []
    found = class_names(blocks(model, machine.blocks))
    kind, share = parsed(machine.recompute)
    if machine.offload and device == "cpu":
        raise ValueError(
            "machine.offload is asked for on a CPU, where activations are in host memory anyhow; leave it out"
        )
    if channels_last(model, machine.channels_last, device=device, sharded=sharded):
        notes.append("convolutions run channels last")
    if count := recompute(model, machine.recompute, names=machine.blocks, offload=machine.offload):
        notes.append(f"recompute {machine.recompute}: {count} blocks of {', '.join(found)}")
    if count := compile_(model, machine.compile, mode=machine.compile_mode, names=machine.blocks, sharded=sharded,
                         budget=share if kind == "budget" else None):  # fmt: skip
        notes.append(f"compile {machine.compile}: {count} {'blocks' if machine.compile == 'regional' else 'model'};"
                     " the first step waits for it")  # fmt: skip
    return found, notes
