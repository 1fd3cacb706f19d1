"""The state of a training run: what a checkpoint holds."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.tensors import local
from oneloop.checkpoint.checkpoints import Checkpoints, settings_of
from oneloop.checkpoint.resume import RunState
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.processes import Run
from oneloop.loop.counters import Best, Counters, Results
from oneloop.measure.meter import Meter
from oneloop.measure.noise_scale import NoiseScale
from oneloop.optim.bad_step_guard import Guard
from oneloop.run.compatibility import InputCheck
from oneloop.run.final_weights import TASK
from oneloop.task_protocol.protocol import Progress


class State(RunState):
    """All that a run saves and resumes.

    Everything else is derived from it, except the number of bad steps in a row.

    Args:
        job: what the recipe describes.
        run: this process.
        folder: the path of the run folder; nothing is written to it here.
        model: the prepared model.
        optimizer: the optimizer of its trained parameters.
        emas: EMAs of its weights.
        guard: the bad-step guard, whose window of losses and norms is saved.
        seen: what the preflight check found out: names of metrics, and FLOPs per sample.
    """

    emas: Sequence[EMA]
    optimizer: Optimizer

    def __init__(
        self,
        job: Job,
        run: Run,
        folder: Path,
        model: nn.Module,
        optimizer: Optimizer,
        emas: Sequence[EMA],
        guard: Guard,
        seen: Preflight,
    ) -> None:
        recipe = job.recipe
        task = job.task
        self.count = Counters()
        self.best = Best(recipe.eval.metric, upward=job.upward)
        self.results = Results()
        self.meter = _meter(job, run, model, seen)
        self.checkpoints = Checkpoints(
            folder / "checkpoints",
            run.accelerator,
            origin=getattr(task, "origin", None),
            complete=False,
            settings=settings_of(optimizer, job.rate.scheduled),
            sync=recipe.save.sync,
            max_failures=recipe.save.max_failures,
            patience=recipe.machine.patience,
            say=run.display.say,
        )
        self._let_saves_overlap(run, model, seen, sync=recipe.save.sync)

        # One process waits for its save when it ends. Of several, one that fails exits at once:
        # its shard of the checkpoint never arrives.
        if run.ranks == 1 and not recipe.mirror:
            run.closing.callback(self.checkpoints.close)

        same = InputCheck(job, self.count, run.display.say)

        # Name the components. A resume restores them in this order.
        parts: dict[str, Any] = {
            "counters": self.count,
            "best": self.best,
            "meter": self.meter,
            "results": self.results,
            "noise": NoiseScale(),
            "guard": guard,
            "identity": same,
            "draws": seen.others,
        }
        if hasattr(task, "progress"):
            task.progress = Progress(lambda: self.count.position, job.layout.size, job.steps)
        if hasattr(task, "state_dict"):
            parts[TASK] = task
        for ema in emas:
            parts[ema.name] = ema
        if run.accelerator.scaler:
            parts["scaler"] = run.accelerator.scaler

        super().__init__(
            model,
            optimizer,
            emas=emas,
            parts=parts,
            own=["tracking"],
            check=same.check,
            tried=True,
        )

    def _let_saves_overlap(
        self, run: Run, model: nn.Module, seen: Preflight, *, sync: bool
    ) -> None:
        """Let copies overlap with training, unless its forwards may change parameters."""
        saving = self.checkpoints.saving
        moves = any(name.startswith("parameter") for name in seen.moved)
        saving.overlaps = not (moves or seen.stateful)
        saving.watched = partial(_trained, model)
        # Once the first step has made the optimizer's state, make the memory of saves.
        if run.device.type == "cuda" and not sync:
            saving.ahead = self._bytes_of_save

    def _bytes_of_save(self) -> int:
        """Return the bytes of a save on this rank; 0 before the first step."""
        return self.bytes_of_rank(self.checkpoints) if self.optimizer.state else 0

    @property
    def noise(self) -> NoiseScale:
        """Estimator of the gradient noise scale."""
        estimator: NoiseScale = self.parts["noise"]
        return estimator


@torch.no_grad()
def _trained(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters, and this rank's shards of them.

    A change of a sharded parameter is counted by itself or by its shard.
    """
    whole = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*whole, *map(local, whole)]


def _meter(job: Job, run: Run, model: nn.Module, seen: Preflight) -> Meter:
    # Most products are those of the largest weight (bytes are those of quantized weights).
    largest = max(model.parameters(), key=lambda one: one.numel() * one.is_floating_point())

    # With batch.grain, the meter keeps one row per leaf, so that sums do not depend on the layout.
    return Meter(
        run.accelerator,
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        flops=seen.flops,
        peak=run.peak_flops(largest.dtype) if run.main else 0.0,  # it may be measured
        tokens=job.unit == "tokens",
        metrics=seen.metrics,
        leaves=job.layout.leaves(run.rank) if job.exact else (),
    )
