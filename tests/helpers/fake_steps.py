"""Steps and evaluations of a recipe on fake CUDA tensors, by the functions of train.py itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import tiny
from fake_cuda import Seen, on_cuda
from oneloop.data.step_batches import Batch, Group, groups, to_device
from oneloop.ema import EMA
from oneloop.evaluation import evaluating
from oneloop.job.build import Job, build_job
from oneloop.job.model import build_model
from oneloop.job.preflight_result import Preflight, metric_names
from oneloop.launch.processes import Run
from oneloop.loop.gradients import Gradients
from oneloop.measure.meter import Meter
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.bad_step_policy import Fault
from oneloop.recipe.parse import read
from oneloop.task_protocol.evaluation_metrics import make_metrics
from oneloop.train import accept, accumulate, update

HOST = torch.device("cpu")


class Prepared:
    """A job of a recipe, and its first batches in host memory; made before tensors are fake.

    Args:
        words: the recipe and its keys, as on the command line.
        steps: number of steps whose batches are loaded.
    """

    def __init__(self, words: Sequence[str], steps: int = 3) -> None:
        self.words = [*words]
        self.job = build_job(read(self.words), ranks=1, device="cuda")
        job = self.job
        loaded = groups(
            job.train_set,
            job.collate,
            job.order,
            job.layout,
            rank=0,
            seed=job.recipe.seed,
            start=0,
            device=HOST,
        )
        self.groups: list[tuple[list[Batch], list[float]]] = []
        for _ in range(steps):
            group = next(loaded)
            self.groups.append(([*group.batches], group.weights))

    def fresh(self) -> Job:
        """Return the job with another model, which nothing has prepared yet."""
        job = self.job
        model = build_model(job.recipe, job.task, job.layout, sharded=False, device="cuda")
        return replace(job, built=model)


class FakeSteps:
    """The parts of a run, built as train() builds them, on fake CUDA.

    Args:
        prepared: the recipe.
        job: what :meth:`Prepared.fresh` returned.
        run: of :func:`fake_cuda.fake_run`.
        seen: of :func:`fake_cuda.fake_cuda`.
    """

    def __init__(self, prepared: Prepared, job: Job, run: Run, seen: Seen) -> None:
        self.job = job
        self.run = run
        self.seen = seen
        self._prepared = prepared
        self._position = 0
        run.accelerator.gradient_accumulation_steps = job.layout.accumulate
        self.model = run.prepare(on_cuda(job.model), blocks=job.built.blocks)
        parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = job.make_optimizer(self.model)
        self.emas = [EMA(self.model, settings, optimizer=self.optimizer) for settings in job.emas]

        # The preflight check reads values; find out the names of the metrics only.
        with torch.no_grad():
            outputs = job.task.loss(self.model, self.batches(0)[0])[1]
        found = Preflight(metrics=metric_names(outputs))
        self.gradients = Gradients(job, run, self.model, parameters, found)
        self.guard = Guard(
            self.optimizer,
            device=run.device,
            scaler=run.accelerator.scaler,
            sigma=job.recipe.guard.sigma,
            total=self.gradients.total,
        )
        self.meter = Meter(
            run.accelerator,
            parameters,
            metrics=found.metrics,
            leaves=job.layout.leaves(run.rank) if job.exact else (),
        )

    def batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of a step on the device."""
        return [to_device(batch, self.run.device) for batch in self._prepared.groups[step][0]]

    def step(self, number: int, *, log: bool = False) -> Fault | None:
        """Run one step, and return the fault of the step before (None: there was none).

        Args:
            number: of the step, from 0.
            log: whether a log line follows.
        """
        job = self.job
        batches = self.batches(number)
        self.seen.clear()
        weights = self._prepared.groups[number][1]
        group = Group(iter(batches), weights, apart=job.exact, total=sum(weights))
        accumulate(
            self.run,
            self.gradients,
            group,
            self.meter,
            position=number * job.layout.size,
            measured=log,
        )

        # Resolve the step before, as train() does.
        before = self.guard.resolve()
        if before is not None and before.fault is Fault.NONE:
            accept(before, self.meter, self.emas, job.layout.size)

        self.meter.before_update(log)
        recipe = job.recipe.optimizer
        update(self.gradients, self.guard, lr=recipe.lr, clip=recipe.clip, weight=group.total)
        return None if before is None else before.fault

    def evaluation(self) -> Any:
        """Add two micro-batches to the losses and metrics of an evaluation; return the losses.

        Only the second one is recorded: an evaluation may copy once what all of them need.
        """
        job = self.job
        task: Any = job.task
        metrics = None
        if hasattr(task, "metrics"):
            metrics = make_metrics(task, "metrics", self.run.device)
        losses = []
        batches = [self.batches(number)[0] for number in (0, 1)]
        with evaluating(self.model):
            for batch in batches:
                self.seen.clear()
                loss, outputs = task.loss(self.model, batch)
                losses.append(loss.detach().clone())
                if metrics is not None:
                    task.update(metrics, batch, outputs)
        return losses


class HalfParameters(tiny.Ragged):
    """A model whose parameters are bfloat16."""

    def model(self) -> nn.Module:
        return super().model().bfloat16()
