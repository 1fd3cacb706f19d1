"""The state of a training run: what a checkpoint holds, in a folder, and with a log."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.bucket import is_address
from oneloop.basics.tensors import local
from oneloop.checkpoint.checkpoints import Checkpoints, settings_of
from oneloop.checkpoint.resume import RunState
from oneloop.data.step_batches import in_memory
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.processes import Run
from oneloop.loop.counters import Best, Counters
from oneloop.loop.start_lines import start_lines
from oneloop.measure.meter import Meter
from oneloop.measure.noise_scale import NoiseScale
from oneloop.optim.bad_step_guard import Guard
from oneloop.recipe.class_paths import CHOICES, source
from oneloop.run.before_run import before_run
from oneloop.run.compatibility import InputCheck
from oneloop.run.environment import environment
from oneloop.run.final_weights import TASK
from oneloop.run.folder import Folder, in_one_folder
from oneloop.show.tracking import Tracking
from oneloop.supervise.pipe import CHANNEL
from oneloop.task_protocol.protocol import Progress

_SMALL = 1 << 19  # approximate bytes of a checkpoint without tensors: manifests, metrics, a page


class State(RunState):
    """All that a run saves and resumes, and its log.

    Everything else is derived from it, except the number of bad steps in a row.

    Args:
        job: what the recipe describes.
        run: this process.
        folder: the run folder; nothing is written to it here.
        model: the prepared model.
        optimizer: the optimizer of its trained parameters.
        emas: EMAs of its weights.
        guard: the bad-step guard, whose window of losses and norms is saved.
        trial: what the preflight check found out: names of metrics, and FLOPs per sample.
    """

    emas: Sequence[EMA]
    optimizer: Optimizer
    tracking: Tracking  # metrics.jsonl and the trackers, once the folder is open
    resumed = False  # whether the run continues from a checkpoint in its folder

    def __init__(
        self,
        job: Job,
        run: Run,
        folder: Folder,
        model: nn.Module,
        optimizer: Optimizer,
        emas: Sequence[EMA],
        guard: Guard,
        trial: Preflight,
    ) -> None:
        recipe = job.recipe
        task = job.task
        self.job = job
        self.run = run
        self.folder = folder
        self.count = Counters()
        self.best = Best(recipe.eval.metric, upward=job.upward)
        self.noise = NoiseScale()

        # Most products are those of the largest weight (bytes are those of quantized weights). With
        # batch.grain, the meter keeps one row per leaf, so that sums do not depend on the layout.
        largest = max(model.parameters(), key=lambda one: one.numel() * one.is_floating_point())
        self.meter = Meter(
            run.accelerator,
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            flops=trial.flops,
            peak=run.peak_flops(largest.dtype) if run.main else 0.0,  # it may be measured
            tokens=job.unit == "tokens",
            metrics=trial.metrics,
            leaves=job.layout.leaves(run.rank) if job.exact else (),
        )
        self.checkpoints = Checkpoints(
            folder.path / "checkpoints",
            run.accelerator,
            origin=getattr(task, "origin", None),
            complete=False,
            settings=settings_of(optimizer, job.rate.scheduled),
            patience=recipe.machine.patience,
            say=run.display.say,
        )

        # Let copies overlap with training, unless its forwards may change parameters.
        saving = self.checkpoints
        moves = any(name.startswith("parameter") for name in trial.moved)
        saving.overlaps = not (moves or trial.stateful)
        saving.watched = partial(_trained, model)
        # Once the first step has made the optimizer's state, make the memory of saves.
        if run.device.type == "cuda":
            saving.ahead = lambda: self.bytes_of_rank(self.checkpoints) if optimizer.state else 0

        # One process waits for its save when it ends. Of several, one that fails exits at once:
        # its shard of the checkpoint never arrives.
        if run.ranks == 1 and not recipe.mirror:
            run.closing.callback(self.checkpoints.close)

        # Name the components. A resume restores them in this order.
        same = InputCheck(job, self.count, run.display.say)
        parts: dict[str, Any] = {
            "counters": self.count,
            "best": self.best,
            "meter": self.meter,
            "noise": self.noise,
            "guard": guard,
            "identity": same,
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
            parts=parts,
            own=["tracking"],
            check=same.check,
            tried=True,
        )

    def open(self, trial: Preflight) -> None:
        """Print the start-up log, lock the folder, resume, and begin the log of the run.

        Collective: call on every rank.

        Args:
            trial: what the preflight check found out, for the start-up log; and the model's graph
                for TensorBoard.

        Raises:
            BadInput: the folder is in use or too full, or its checkpoints are damaged or do not
                fit; raised on all ranks.
        """
        job = self.job
        run = self.run
        folder = self.folder
        count = self.count
        recipe = job.recipe
        say = run.display.say
        run.display.lines(start_lines(job, run, self.model, self.optimizer, self.emas, trial))

        # Lock the folder and the mirror before reading them: another start might still write there.
        self._lock()

        # Let the task work with the weights before the first step. A dry run only tries it.
        if not recipe.debug.dry_run:
            before_run(job.task, self.model, run, sets=job.sets)

        # Resume.
        with run.setting_up():
            saved = self.resume(self.checkpoints, recipe.run.resume, say=say)
            size = job.layout.size
            if hasattr(job.order, "copies") and count.position % size:
                raise ValueError(
                    f"the checkpoint's {count.position:,} samples are not a multiple of batch.size "
                    f"{size}, so task.repeats would divide the copies of a sample among two steps; "
                    "keep batch.size"
                )

        # Write the recipe and the environment. From here on, a stop saves a checkpoint.
        with run.setting_up():
            run.stopping.early = False
            run.begun = True
            # The supervisor also learns that from now on a stop is more than an end.
            CHANNEL.folder = folder.path.absolute()
            CHANNEL.send(folder=str(CHANNEL.folder))
            if run.main:
                folder.begin(recipe.yaml(), self._environment())

        # Begin the log. Its state is saved, too: a resume deletes the lines of lost steps.
        count.begin()
        self.tracking = Tracking(
            run.accelerator,
            folder.path,
            project=recipe.name,
            config=recipe.resolved,
            resumed=saved.get("tracking"),
            step=count.step,
            graph=trial.graph,
            say=say,
        )
        self.parts["tracking"] = self.tracking
        self.resumed = "tracking" in saved
        run.closing.callback(self.tracking.close)
        if saved:
            self.write({"event": "resume"})
        run.display.begin(lambda: count.step, total=job.steps)

    def _lock(self) -> None:
        """Lock the folder, if its disk has room for the run, and begin to write to the mirror."""
        job = self.job
        run = self.run
        folder = self.folder

        # Estimate the bytes still to write. Under FSDP2, the estimate is collective. In a temporary
        # folder of an address, checkpoints are not kept.
        recipe = job.recipe
        once, each = self.size(job.tried.share, getattr(job.task, "origin", None))
        temporary = is_address(recipe.run.dir)
        each = 0 if temporary else each + _SMALL
        with run.setting_up():
            if run.main:
                there = len(self.checkpoints.store.sealed())
                folder.hold(need=max(0, job.checkpoints_kept - there) * each + once + _SMALL)

        # Do the ranks share the folder? If not, only the mirror keeps the checkpoints.
        address = recipe.mirror
        shared = not temporary
        if shared and run.ranks > 1:
            shared = in_one_folder(
                folder.path, run, recipe.machine.patience, required=address is None
            )
        if address is None:
            return
        from oneloop.run.mirrored_folder import MirroredFolder

        assert isinstance(folder, MirroredFolder)

        # Rank 0 has the lease of the mirror; the other ranks write under it.
        lease = folder.lease and (folder.lease.number, folder.lease.about)
        self.checkpoints.mirror(address, lease=run.from_main(lease), counts=not shared)
        if run.main:
            folder.uploads = self.checkpoints
        kind = "copies of run.dir"
        if not shared:
            kind = "a checkpoint counts when it is there; hosts need no shared disk"
        run.display.say(f"mirror: {address} ({kind})")

    def _environment(self) -> dict[str, Any]:
        """Return the content of environment.json. Keys that do not apply are left out."""
        job = self.job
        run = self.run
        recipe = job.recipe

        # Without a GPU, training uses all cores. Data in memory needs no workers.
        alone = run.device.type == "cpu" or in_memory(job.train_set)

        about = environment(
            command=[*run.command],
            device=str(run.device),
            processes=run.ranks,
            inputs=job.inputs,
            eval_micro=recipe.eval.micro or job.layout.each,
            workers=run.workers(recipe.machine.workers),
            data_cores=0 if alone else run.cores,
            starts=self.folder.starts(run.began, self.count.seconds),
        )
        file = source("task", recipe.task.name)
        if file:
            about["task"] = str(file)
        if recipe.task.name in CHOICES["task"] and hasattr(job.task, "recorded"):
            about["recorded"] = {"task": recipe.task.name, **job.task.recorded}
        skipped = getattr(job.task, "skipped_rows", None)
        if skipped:
            about["skipped_rows"] = skipped
        return about

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Log a line to metrics.jsonl and the trackers: the counters, then these metrics.

        Args:
            metrics: by name; they may override counters.

        Raises:
            OSError: the folder was moved.
        """
        moved = self.folder.moved() if self.run.main else ""
        if moved:  # the supervisor must not write there, either
            CHANNEL.folder = None
            CHANNEL.send(folder=None)
            raise OSError(moved)
        self.tracking.log({**self.count.as_metrics(self.job.unit), **metrics})


@torch.no_grad()
def _trained(model: nn.Module) -> list[Tensor]:
    """Return the trained parameters, and this rank's shards of them.

    A change of a sharded parameter is counted by itself or by its shard.
    """
    whole = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*whole, *map(local, whole)]
