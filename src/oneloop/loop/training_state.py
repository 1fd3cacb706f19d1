"""The state of a training run: what a checkpoint holds. A run opens its folder and restores it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.bucket import is_address
from oneloop.basics.tensors import local
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.moved_buffers import MovedBuffers
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.store import Store
from oneloop.data.fingerprint import fingerprint_of
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight import Preflight
from oneloop.launch.processes import Run
from oneloop.loop.counters import Best, Counters, Results, RunLog
from oneloop.measure.meter import Meter
from oneloop.measure.noise_scale import NoiseScale
from oneloop.optim.bad_step_guard import Guard
from oneloop.recipe.class_paths import CHOICES, source
from oneloop.run.compatibility import InputCheck, inputs_of
from oneloop.run.environment import environment
from oneloop.run.final_weights import TASK
from oneloop.run.folder import Folder
from oneloop.run.mirrored_folder import MirroredFolder
from oneloop.run.same_on_ranks import in_one_folder
from oneloop.run.saved_forms import forms_with
from oneloop.show.tracking import Tracking
from oneloop.supervise.pipe import CHANNEL
from oneloop.task_protocol.protocol import Progress

_SMALL = 1 << 19  # approximate bytes of a checkpoint without tensors: manifests, metrics, a page


class State(RunState):
    """All that a run saves and resumes.

    Everything else is derived from it, except the number of bad steps in a row.

    Args:
        job: what the recipe describes.
        run: this process.
        folder: the run folder; nothing is written to it here.
        model: the prepared model.
        optimizer: the optimizer of its trained parameters.
        emas: EMAs of its weights.
        guard: the bad-step guard, whose window of losses and norms is saved.
        seen: what the preflight check found out: names of metrics, and FLOPs per sample.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        folder: Folder,
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
            folder.path / "checkpoints",
            run.accelerator,
            origin=getattr(task, "origin", None),
            sync=recipe.save.sync,
            max_failures=recipe.save.max_failures,
            patience=recipe.machine.patience,
            forms=forms_with([ema.name for ema in emas]),
            say=run.display.say,
        )

        self._let_saves_overlap(run, model, seen, sync=recipe.save.sync)

        # One process waits for its save when it ends. Of several, one that fails exits at once:
        # its shard of the checkpoint never arrives.
        if run.ranks == 1 and not recipe.mirror:
            run.closing.callback(self.checkpoints.close)

        # Fingerprint data and model on rank 0, which loads samples and may fail.
        inputs: dict[str, Any] = {}
        with run.setting_up():
            if run.main:
                inputs = inputs_of(job, run, optimizer, seen)
        same = InputCheck(
            run.from_main(inputs),
            accept_changes=recipe.run.accept_changes,
            same_recipe=recipe.run.resume in ("auto", "never"),
            say=run.display.say,
        )

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
            moved=MovedBuffers(model),
        )

    def _let_saves_overlap(
        self, run: Run, model: nn.Module, seen: Preflight, *, sync: bool
    ) -> None:
        """Let copies overlap with training, unless its forwards may change parameters."""
        saving = self.checkpoints.saving
        saving.overlaps = not (seen.moved.startswith("parameter") or seen.stateful)
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
        peak=run.peak_flops(largest.dtype),
        tokens=job.unit == "tokens",
        metrics=seen.metrics,
        leaf=job.layout.leaf if job.exact else None,
        leaves=job.layout.accumulate,
    )


def open_run(job: Job, run: Run, folder: Folder, state: State, *, graph: Any = None) -> RunLog:
    """Lock the folder, resume as the recipe says, write the recipe and the environment.

    Collective: call on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        folder: the run folder; rank 0 locks and writes it.
        state: restored in place from a checkpoint, if there is one.
        graph: the model's graph for TensorBoard, a ``GraphDef``.

    Returns:
        The log of the run.

    Raises:
        BadInput: the folder is in use or too full, or its checkpoints are damaged or do not fit;
            raised on all ranks.
    """
    recipe = job.recipe
    say = run.display.say

    # Lock the folder and the mirror before reading them: another start might still write there.
    _lock(job, run, folder, state)

    # Resume.
    with run.setting_up():
        saved = state.resume(state.checkpoints, recipe.run.resume, say=say)

    # Write the recipe and the environment. From here on, a stop saves a checkpoint.
    starts: dict[str, float] = {}
    with run.setting_up():
        run.stopping.early = False
        if run.main:
            starts = _begin_folder(job, run, folder, state)

    # Tell the supervisor where the run is, and start the clock.
    CHANNEL.folder = folder.path.absolute()
    CHANNEL.send(folder=str(CHANNEL.folder))
    state.count.begin(run.from_main(starts))

    # Begin the log. Its state is saved, too: a resume deletes the lines of lost steps.
    tracking = Tracking(
        run.accelerator,
        folder.path,
        project=recipe.name,
        config=recipe.resolved,
        resumed=saved.get("tracking"),
        step=state.count.step,
        graph=graph,
        say=say,
    )
    state.parts["tracking"] = tracking
    run.closing.callback(tracking.close)

    def reject_moved() -> None:
        """Raise OSError if the folder was moved; the supervisor must not write there, either."""
        moved = folder.moved() if run.main else ""
        if moved:
            CHANNEL.folder = None
            CHANNEL.send(folder=None)
            raise OSError(moved)

    run_log = RunLog(
        state.count,
        state.results,
        tracking,
        run.display,
        unit=job.unit,
        resumed="tracking" in saved,
        before=reject_moved,
    )
    if saved:
        run_log.event("resume")
    run.display.begin(lambda: state.count.step, total=job.steps)
    return run_log


def _lock(job: Job, run: Run, folder: Folder, state: State) -> None:
    """Lock the folder, if its disk has room for the run, and begin to write to the mirror."""
    # Estimate the bytes still to write. Under FSDP2, the estimate is collective. In a temporary
    # folder of an address, checkpoints are not kept.
    recipe = job.recipe
    once, each = state.size(job.optimizer_share, getattr(job.task, "origin", None))
    temporary = is_address(recipe.run.dir)
    if temporary:
        each = 0
    else:
        each += _SMALL
    with run.setting_up():
        if run.main:
            there = len(Store(folder.path / "checkpoints").sealed())
            folder.hold(need=max(0, job.checkpoints_kept - there) * each + once + _SMALL)

    # Do the ranks share the folder? If not, only the mirror keeps the checkpoints.
    address = recipe.mirror
    shared = not temporary and in_one_folder(
        folder.path, run, recipe.machine.patience, required=address is None
    )
    if not isinstance(folder, MirroredFolder) or address is None:
        return

    # Rank 0 has the lease of the mirror; the other ranks write under it.
    lease = None
    if folder.lease is not None:
        lease = (folder.lease.number, folder.lease.about)
    state.checkpoints.mirror(
        address,
        lease=run.from_main(lease),
        counts=not shared,
        limit=1e6 * recipe.save.upload_limit,  # bytes per second
    )
    if run.main:
        folder.uploads = state.checkpoints.saving
    if shared:
        run.display.say(f"mirror: {address} (copies of run.dir)")
    else:
        run.display.say(
            f"mirror: {address} (a checkpoint counts when it is there; hosts need no shared disk)"
        )


def _begin_folder(job: Job, run: Run, folder: Folder, state: State) -> dict[str, float]:
    """Write the recipe and environment.json; return the times of all starts."""
    recipe = job.recipe

    # Name the data by content, where it is known.
    data: dict[str, Any] = {}
    for name, part in job.sets.items():
        content = fingerprint_of(part)
        if content:
            data[name] = content

    # Describe the run. Keys that do not apply are left out of the file.
    about = environment(
        command=[*run.command],
        device=str(run.device),
        processes=run.ranks,
        data=data,
        eval_micro=recipe.eval.micro or job.layout.each,
    )
    file = source("task", recipe.task.name)
    if file:
        about["task"] = str(file)
    if recipe.task.name in CHOICES["task"] and hasattr(job.task, "recorded"):
        about["recorded"] = {"task": recipe.task.name, **job.task.recorded}
    skipped = getattr(job.task, "skipped_rows", None)
    if skipped:
        about["skipped_rows"] = skipped

    starts = folder.starts(run.began, state.count.seconds)
    about["starts"] = starts
    folder.begin(recipe.yaml(), about)
    return starts
