"""A job: all that the loop needs, built from a recipe and checked before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Subset

from oneloop.basics.duration import Duration, Scale
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.data.groups import Group, Keyed, Split, Weighed, groups, workers_here
from oneloop.data.order import Order
from oneloop.ema import EMA, gamma
from oneloop.evaluate import evaluate_all
from oneloop.measure.diagnosis import Advice
from oneloop.measure.meter import Meter
from oneloop.measure.noise_scale import Sensor
from oneloop.measure.profiling import Profiling
from oneloop.measure.throughput import training_flops
from oneloop.optim.build import build, refuse_if_sharded
from oneloop.optim.policy import Policy
from oneloop.optim.schedule import LearningRate, learning_rate
from oneloop.recipe.mathematics import OptimizerConfig
from oneloop.recipe.names import resolve
from oneloop.recipe.schema import Recipe
from oneloop.run.book import Book
from oneloop.run.model import BuiltModel, build_model
from oneloop.run.processes import Run
from oneloop.run.rhythm import Rhythm
from oneloop.show.examples import Examples
from oneloop.show.graph import model_graph
from oneloop.show.tracking import Tracking
from oneloop.tasks.base import Task, check, check_sets
from oneloop.tasks.metrics import higher_is_better, metric_names, prefix


@dataclass(frozen=True)
class Job:
    """What one run does, with all durations in steps; and, by its methods, what the loop is made of."""

    recipe: Recipe
    task: Task
    train_set: Any
    eval_sets: dict[str, Any]
    split: Split
    order: Order
    collate: Weighed
    rhythm: Rhythm
    keep_every: int
    rate: LearningRate
    averages: list[dict[str, Any]]
    """arguments of each EMA"""
    built: BuiltModel
    flops: float
    """floating-point operations of training on one sample (0: not known)"""
    notes: list[str]
    """how the model runs, for a person to read at the start"""
    upward: bool
    """whether a larger eval.best metric is the better one"""
    no_noise_scale: str | None
    """why the noise scale cannot be measured"""

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.rhythm.total

    @property
    def unit(self) -> str:
        """What the weight counts: samples or tokens."""
        return getattr(self.task, "unit", "samples")

    @property
    def model(self) -> nn.Module:
        return self.built.model

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.machine.torch_dtype

    @property
    def noise_scale(self) -> bool:
        """Whether it is measured."""
        return self.recipe.log.noise_scale and self.no_noise_scale is None

    @property
    def policy(self) -> Policy:
        guard = self.recipe.guard
        return Policy(guard.nonfinite, guard.spike, guard.sigma, guard.window)

    # --- what the loop is made of ---

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The recipe's optimizer over the prepared model."""
        chosen = self.recipe.optimizer
        make = resolve("optimizer", chosen.name)
        return build(make, model, lr=chosen.lr, weight_decay=chosen.weight_decay, options=chosen.options)

    def emas(self, model: nn.Module, optimizer: Optimizer) -> list[EMA]:
        """The recipe's averages of the prepared model."""
        ema = self.recipe.ema
        common: dict[str, Any] = {"every": ema.every, "ramp": ema.ramp, "device": ema.device, "optimizer": optimizer}
        return [EMA(model, **common, **own) for own in self.averages]

    def workers(self, run: Run) -> int:
        """Processes that load data for this one."""
        return workers_here(self.recipe.machine.workers, device=run.device, local_ranks=run.local_ranks)

    def groups(self, run: Run, *, start: int) -> Iterator[Group]:
        """This rank's micro-batches, step by step, from position ``start`` on; without an end."""
        here: dict[str, Any] = {"rank": run.rank, "device": run.device, "workers": self.workers(run)}
        return groups(self.train_set, self.collate, self.order, self.split, seed=self.recipe.seed, start=start, **here)

    def evaluate(
        self,
        model: nn.Module,
        sets: Mapping[str, Any],
        run: Run,
        *,
        averages: Sequence[EMA] = (),
        examples: Examples | None = None,
    ) -> dict[str, dict[str, float]] | None:
        """Figures by weights; None where a stop came first. Every rank must get here."""
        return evaluate_all(
            self.task,
            model,
            sets,
            averages=averages,
            examples=examples,
            accelerator=run.accelerator,
            micro=self.recipe.eval.micro or self.split.each,
            workers=self.workers(run),
            dtype=self.dtype,
            seed=self.recipe.seed,
            interrupted=run.stop_wanted,
        )

    def meter(self, run: Run, parameters: Iterable[Tensor]) -> Meter:
        """Figures of training."""
        tokens = self.unit == "tokens"
        return Meter(run.accelerator, parameters, flops=self.flops, peak=run.peak_flops(), tokens=tokens)

    def checkpoints(self, folder: Path, run: Run) -> Checkpoints:
        """The checkpoints of the run in ``folder``."""
        save = self.recipe.save
        return Checkpoints(
            folder / "checkpoints",
            run.accelerator,
            sync=save.sync,
            max_failures=save.max_failures,
            say=run.display.say,
        )

    def tracking(self, folder: Path, run: Run, *, resumed: Mapping[str, Any] | None, step: int) -> Tracking:
        """metrics.jsonl and the trackers, going on from what was ``resumed`` at ``step``."""
        return Tracking(
            run.accelerator,
            folder,
            project=self.recipe.name,
            config=self.recipe.resolved,
            resumed=resumed,
            step=step,
            graph=self.graph,
            say=run.display.say,
        )

    def graph(self) -> Any:
        """The model's operations on one sample, for TensorBoard."""
        sample = Keyed(self.train_set, seed=0)[0, 0]
        return model_graph(self.task.model, self.task.loss, self.collate([sample])[0])

    def profiling(self, folder: Path, run: Run, book: Book) -> Profiling:
        """A trace of the steps that the recipe names, on rank 0."""
        watch = self.recipe.watch
        return Profiling(
            folder / "profile",
            run.device,
            profile=watch.profile if run.main else None,
            memory=watch.memory if run.main else None,
            say=run.display.say,
            log=lambda figures: book.write(book.line(**figures)),
        )

    def advice(self, run: Run) -> Advice:
        """What to say of where the time goes, once the first lines are over."""
        every = self.rhythm.every
        about = {"eval_every": every["eval"], "save_every": every["save"]}
        return Advice(after=3, workers=self.workers(run), cores=run.cores, **about)


def build_job(
    recipe: Recipe, *, ranks: int, sharded: bool = False, device: str = "cpu", micro: int | None = None
) -> Job:
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
    sample_weight = getattr(task, "sample_weight", None)
    tokens = sample_weight if getattr(task, "unit", "samples") == "tokens" else None
    scale = Scale(split.size, len(train_set), tokens)
    total = recipe.duration.steps(scale)
    averages = _averages(recipe, scale, total)
    _check_best(recipe.eval.best, task, eval_sets, [average["name"] for average in averages])
    if total < 1:
        raise ValueError(f"duration {recipe.duration} is no step at all; the shortest is 1")
    collate = Weighed(task.collate, task.weight, sample_weight=sample_weight, dtype=recipe.machine.torch_dtype)
    built = build_model(recipe, task, split, sharded=sharded, device=device)
    flops, unknown = _flops(task, train_set, collate)
    return Job(
        recipe=recipe,
        task=task,
        train_set=train_set,
        eval_sets=eval_sets,
        split=split,
        order=Order(len(train_set), seed=recipe.seed),
        collate=collate,
        rhythm=_rhythm(recipe, scale, total),
        keep_every=recipe.save.forever.steps(scale, total=total, key="save.forever"),
        rate=_rate(recipe, scale, total),
        averages=averages,
        built=built,
        flops=flops,
        notes=[*built.notes, *unknown],
        upward=higher_is_better(task, recipe.eval.best),
        no_noise_scale=Sensor.why_not(ranks, split.accumulate, sharded=sharded),
    )


def _check_best(best: str, task: Task, eval_sets: Iterable[str], averages: Iterable[str]) -> None:
    """Refuses an ``eval.best`` that no evaluation finds."""
    metrics = sorted(
        f"{prefix(name)}/{metric}" for name in eval_sets if name != "test" for metric in metric_names(task)
    )
    metrics += [f"{average}/{metric}" for average in averages for metric in metrics]
    if metrics and best not in metrics:
        raise ValueError(f"eval.best {best!r} is none of this task's metrics: {', '.join(metrics)}")


def _rhythm(recipe: Recipe, scale: Scale, total: int) -> Rhythm:
    def steps(every: Duration, key: str) -> int:
        return every.steps(scale, total=total, key=key)

    machine = recipe.machine
    every = {
        "log": max(1, steps(recipe.log.every, "log.every")),
        "eval": steps(recipe.eval.every, "eval.every"),
        "save": steps(recipe.save.every, "save.every"),
    }
    if machine.check_every.amount:
        every["check"] = steps(machine.check_every, "machine.check_every")
    if machine.gc_every.amount:
        every["collect"] = steps(machine.gc_every, "machine.gc_every")
    return Rhythm(every, 1 if recipe.debug.dry_run else total)


def _rate(recipe: Recipe, scale: Scale, total: int) -> LearningRate:
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
    """The peak learning rate at this global batch: linear (Goyal et al. 2017) or sqrt (Malladi et al. 2022) scaling."""
    if not optimizer.lr_at_batch:
        return optimizer.lr
    power = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}[optimizer.lr_rule]
    return float(optimizer.lr * (batch / optimizer.lr_at_batch) ** power)


def _flops(task: Task, train_set: Any, collate: Weighed) -> tuple[float, list[str]]:
    """Operations of training on a sample (the mean of a few, where they differ), or a line that says why not."""
    samples = Keyed(train_set, seed=0)
    number = 1 if collate.sample_weight is not None else min(4, len(train_set))
    try:
        each = [training_flops(task.model, task.loss, collate([samples[0, index]])[0]) for index in range(number)]
    except Exception as error:  # a model that cannot be built or run without values is no worse for that
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        return 0.0, [f"MFU n/a: the model's operations cannot be counted without running it ({why})"]
    return sum(each) / number, []


def _averages(recipe: Recipe, scale: Scale, total: int) -> list[dict[str, Any]]:
    """Arguments of each EMA, named after what it is where there are several."""
    ema = recipe.ema
    averages: list[dict[str, Any]] = [
        {"half_life": half_life.samples(scale, total=total, key="ema.half_life"), "name": f"ema-{half_life.text}"}
        for half_life in ema.half_lives
    ]
    averages += [{"decay": ema.decay, "name": f"ema-{ema.decay}"}] if ema.decay else []
    averages += [{"power": width, "name": f"ema-power-{width}"} for width in ema.power]
    for width in ema.power:
        gamma(width)  # refuses what is too wide
    if len(averages) == 1 and not ema.power:
        averages[0]["name"] = "ema"
    names = [average["name"].replace(" ", "") for average in averages]
    if len(set(names)) < len(names):
        raise ValueError(f"ema: two averages are the same, of {', '.join(names)}; give each once")
    return [{**average, "name": name} for average, name in zip(averages, names, strict=True)]
