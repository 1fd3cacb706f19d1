"""The state of a training run: what a checkpoint holds, from the first step on."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from oneloop.basics.bucket import is_address
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.store import Store
from oneloop.data.rows.cache import fingerprint_of
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight import Preflight
from oneloop.launch.environment import environment
from oneloop.launch.processes import Run
from oneloop.measure.meter import Meter
from oneloop.measure.noise_scale import NoiseScale
from oneloop.optim.bad_step_guard import Guard
from oneloop.recipe.class_paths import CHOICES, source
from oneloop.run.compatibility import InputCheck, inputs_of
from oneloop.run.counters import Best, Counters, Results, RunLog
from oneloop.run.export import TASK
from oneloop.run.folder import Folder
from oneloop.run.mirrored_folder import MirroredFolder
from oneloop.run.same_on_ranks import in_one_folder
from oneloop.show.tracking import Tracking
from oneloop.supervise.pipe import CHANNEL
from oneloop.tasks.protocol import Progress

_SMALL = 1 << 19  # approximate bytes of a checkpoint without tensors: manifests, metrics, a page


class State(RunState):
    """All that a run saves and resumes. Everything else is derived from it, except the number of
    bad steps in a row."""

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
        recipe, task, save = job.recipe, job.task, job.recipe.save
        self.count, self.best, self.results, self.noise = (
            Counters(),
            Best(),
            Results(),
            NoiseScale(),
        )
        about: dict[str, Any] = {
            "flops": seen.flops,
            "peak": run.peak_flops(),
            "tokens": job.unit == "tokens",
        }
        if job.exact:
            about |= {"leaf": job.layout.leaf, "leaves": job.layout.accumulate}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.meter = Meter(run.accelerator, trained, **about, metrics=seen.metrics)
        how: dict[str, Any] = {
            "sync": save.sync,
            "max_failures": save.max_failures,
            "say": run.display.say,
        }
        how |= {"origin": getattr(task, "origin", None), "patience": recipe.machine.patience}
        self.checkpoints = Checkpoints(folder.path / "checkpoints", run.accelerator, **how)
        # with several, a failed one exits at once: its shard never arrives
        if run.ranks == 1 and not recipe.mirror:
            run.closing.callback(self.checkpoints.close)
        with run.setting_up():
            known = inputs_of(job, run, optimizer) if run.main else {}
        same = InputCheck(
            run.from_main(known), accept_changes=recipe.run.accept_changes, say=run.display.say
        )
        parts: dict[str, Any] = {"counters": self.count, "best": self.best, "meter": self.meter}
        parts |= {"results": self.results, "noise": self.noise, "guard": guard, "identity": same}
        if hasattr(task, "progress"):
            task.progress = Progress(lambda: self.count.position, job.layout.size, job.steps)
        parts |= {TASK: task} if hasattr(task, "state_dict") else {}
        parts |= {ema.name: ema for ema in emas}
        parts |= {"scaler": run.accelerator.scaler} if run.accelerator.scaler else {}
        super().__init__(
            model, optimizer, emas=emas, parts=parts, own=["tracking"], check=same.check
        )

    def begin(self, job: Job, run: Run, folder: Folder, *, graph: Any = None) -> RunLog:
        """Lock the folder, resume as the recipe says, write the recipe and the environment; return
        the log.

        Raise BadInput on all ranks if the folder is in use or too full, or its checkpoints are
        damaged or do not fit. Collective: call on every rank."""
        recipe, say = job.recipe, run.display.say
        self._hold(job, run, folder)
        with run.setting_up():
            saved = self.resume(self.checkpoints, recipe.run.resume, say=say)
        with run.setting_up():
            starts: dict[str, float] = {}
            run.stopping.early = False  # from here on, a stop saves a checkpoint
            if run.main:
                data = {
                    name: content
                    for name, part in job.sets.items()
                    if (content := fingerprint_of(part))
                }
                about: dict[str, Any] = {
                    "device": str(run.device),
                    "processes": run.ranks,
                    "data": data,
                }
                about["eval_micro"] = recipe.eval.micro or job.layout.each
                if file := source("task", recipe.task.name):
                    about["task"] = str(file)
                if recipe.task.name in CHOICES["task"] and hasattr(job.task, "recorded"):
                    about["recorded"] = {"task": recipe.task.name, **job.task.recorded}
                if skipped := getattr(job.task, "skipped_rows", None):
                    about["skipped_rows"] = skipped
                starts = about["starts"] = folder.starts(run.began, self.count.seconds)
                folder.begin(recipe.yaml(), environment(command=[*run.command], **about))
        CHANNEL.folder = folder.path.absolute()
        CHANNEL.send(folder=str(CHANNEL.folder))
        self.count.begin(run.from_main(starts))
        how: dict[str, Any] = {
            "project": recipe.name,
            "config": recipe.resolved,
            "resumed": saved.get("tracking"),
        }
        how |= {"step": self.count.step, "graph": graph, "say": say}
        tracking = self.parts["tracking"] = Tracking(run.accelerator, folder.path, **how)
        run.closing.callback(tracking.close)
        run_log = RunLog(
            self.count,
            self.results,
            tracking,
            run.display,
            unit=job.unit,
            resumed="tracking" in saved,
        )
        if saved:
            run_log.event("resume")
        run.display.begin(lambda: self.count.step, total=job.steps)
        return run_log

    def _hold(self, job: Job, run: Run, folder: Folder) -> None:
        recipe = job.recipe
        # collective under FSDP2
        once, each = self.size(job.optimizer_share, getattr(job.task, "origin", None))
        with run.setting_up():
            if run.main:
                there = len(Store(folder.path / "checkpoints").sealed())
                each = 0 if is_address(recipe.run.dir) else each + _SMALL
                folder.hold(need=max(0, job.checkpoints_kept - there) * each + once + _SMALL)
        patience, address = recipe.machine.patience, recipe.mirror
        scratch = is_address(recipe.run.dir) or not in_one_folder(
            folder.path, run, patience, required=address is None
        )
        if isinstance(folder, MirroredFolder) and address is not None:
            lease = run.from_main(
                (folder.lease.number, folder.lease.about) if folder.lease is not None else None
            )
            self.checkpoints.mirror(
                address, lease=lease, counts=scratch, limit=1e6 * recipe.save.upload_limit
            )
            folder.uploads = self.checkpoints.saving if run.main else None
            counts = "a checkpoint counts when it is there; hosts need no shared disk"
            run.display.say(f"mirror: {address} ({counts if scratch else 'copies of run.dir'})")
