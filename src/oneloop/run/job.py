"""A job: all that the loop needs; :mod:`oneloop.run.build` makes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.beats import BEATS, ENDING, EVALUATION
from oneloop.basics.reseed import reseed
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.run_state import RunState
from oneloop.checkpoint.store import Store, name_of
from oneloop.data.groups import Group, Weighed, groups, workers_here
from oneloop.data.order import Ordered
from oneloop.data.rows.changes import fingerprint_of
from oneloop.data.split import Split
from oneloop.ema import EMA
from oneloop.evaluate import evaluate_all
from oneloop.measure.diagnosis import Advice
from oneloop.measure.meter import Meter
from oneloop.measure.profiling import Profiling
from oneloop.optim.build import build
from oneloop.optim.policy import Policy
from oneloop.optim.schedule import LearningRate
from oneloop.recipe.names import resolve, source
from oneloop.recipe.schema import Recipe
from oneloop.run.agreement import where
from oneloop.run.book import Book
from oneloop.run.counters import Best, Counters
from oneloop.run.environment import environment
from oneloop.run.export import TASK, load_task_state
from oneloop.run.folder import Folder
from oneloop.run.model import BuiltModel, torch_dtype
from oneloop.run.processes import Run
from oneloop.run.rhythm import Rhythm
from oneloop.run.shared_folder import refuse_other_folders
from oneloop.show.examples import Examples
from oneloop.show.tracking import Tracking
from oneloop.supervise.link import LINK
from oneloop.tasks.base import Progress, Task

_SMALL = 1 << 19
"""bytes of what lies beside tensors, about: manifests, metrics, a page"""


@dataclass(frozen=True)
class Job:
    """What one run does, with all durations in steps; and, by its methods, what the loop is made of."""

    recipe: Recipe
    task: Task
    train_set: Any
    eval_sets: dict[str, Any]
    split: Split
    order: Ordered
    collate: Weighed
    rhythm: Rhythm
    keep_every: int
    rate: LearningRate
    averages: list[dict[str, Any]]
    """arguments of each EMA"""
    built: BuiltModel
    optimizer_share: float
    """bytes of the optimizer's state for each byte of the parameters, about"""
    notes: list[str]
    """how the model runs, for a person to read at the start"""
    upward: bool
    """whether a larger eval.best metric is the better one"""
    no_noise_scale: str | None
    """why the noise scale cannot be measured"""

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

    def task_parts(self, count: Counters) -> dict[str, Any]:
        """The task, where it has a state to be saved; it may look at the counters, where it has a ``progress``."""
        if hasattr(self.task, "progress"):
            self.task.progress = Progress(lambda: count.position, self.split.size, self.steps)
        return {TASK: self.task} if hasattr(self.task, "state_dict") else {}

    @property
    def model(self) -> nn.Module:
        return self.built.model

    @property
    def dtype(self) -> torch.dtype:
        return torch_dtype(self.recipe)

    @property
    def exact(self) -> bool:
        """Whether the run is to be the same bits for every split (``batch.grain``)."""
        return self.split.grain is not None

    @property
    def noise_scale(self) -> bool:
        """Whether it is measured."""
        return self.recipe.log.noise_scale and self.no_noise_scale is None

    @property
    def policy(self) -> Policy:
        guard = self.recipe.guard
        return Policy(guard.nonfinite, guard.spike, guard.sigma, guard.window)

    # --- its folder ---

    def hold(self, folder: Folder, run: Run, state: RunState) -> None:
        """Takes the folder for this run, on rank 0. Every rank must get here.

        Raises:
            BadInput: on every rank: it is in use, or there is too little room in it.
        """
        save = self.recipe.save
        once, each = state.size(self.optimizer_share, getattr(self.task, "origin", None))  # of FSDP2: on all ranks
        with run.setting_up():
            if run.main:
                there = len(Store(folder.path / "checkpoints").sealed())
                most = min(save.keep + save.best + 1, 1 + self.steps // max(1, self.rhythm.every["save"] or self.steps))
                folder.hold(need=max(0, most - there) * (each + _SMALL) + once + _SMALL)
        refuse_other_folders(folder.path, run, main=run.main, patience=self.recipe.machine.patience)

    def begin(self, folder: Folder, run: Run) -> None:
        """Writes down what is known before the first step, on rank 0. Every rank must get here."""
        with run.setting_up():
            run.stopping.early = False  # from here on there is something to be left in order
            if run.main:
                data = {name: told for name, part in self.sets.items() if (told := fingerprint_of(part))}
                about: dict[str, Any] = {"device": str(run.device), "processes": run.ranks, "data": data}
                if place := source("task", self.recipe.task.name):
                    about["task"] = str(place)
                folder.begin(self.recipe.yaml(), environment(command=[*run.command], **about))
        LINK.tell(folder=str(folder.path.absolute()))

    def final(
        self, state: RunState, checkpoints: Checkpoints, step: int, best: Best, *, stopped: bool
    ) -> dict[str, Any]:
        """Puts the weights of the best evaluation in place, where the recipe asks for them, the run has come to its
        end, and they are there whole; says which are in place. Every rank must get here, and no save may be under
        way."""
        BEATS.enter(ENDING)
        wanted = self.recipe.save.final == "best" and best.step and not stopped
        if not wanted or (best.step != step and not checkpoints.whole(best.step, "final/ gets the last weights")):
            return {"weights": "last", "step": step, "end": step}
        if best.step != step:
            state.take(checkpoints, best.step)
            load_task_state(self.task, checkpoints.store.root / name_of(best.step))
        return {"weights": "best", "step": best.step, "end": step, "metric": self.recipe.eval.best, "value": best.value}

    def last_sets(self, final: Mapping[str, Any]) -> dict[str, Any]:
        """What is evaluated at the end: the test set; and where an earlier step's weights are in place again, all, so
        that what the summary says is of the weights in ``final/``."""
        again = final["step"] != final["end"]
        return {name: part for name, part in self.eval_sets.items() if again or name == "test"}

    # --- what the loop is made of ---

    def reseed(self, run: Run, position: int, micro: int) -> None:
        """Makes what is random in the model a function of the step and the rank; or of the leaf (``batch.grain``)."""
        if self.exact:
            reseed(run.device, self.recipe.seed, position, self.split.leaf(run.rank, micro), others=True)
        else:
            reseed(run.device, self.recipe.seed, position, run.rank, micro)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The recipe's optimizer over the prepared model."""
        chosen = self.recipe.optimizer
        make = resolve("optimizer", chosen.name)
        try:
            return build(
                make,
                model,
                lr=chosen.lr,
                weight_decay=chosen.weight_decay,
                options=chosen.options,
                settings=self.built.settings,
                elementwise=self.exact,
            )
        except Exception as error:
            raise ValueError(f"optimizer.name {chosen.name} cannot be built: {error}{where(error)}") from error

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
        here["pinned"] = self.recipe.machine.pinned
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
        with BEATS.phase(EVALUATION):
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
                exact=self.exact,
                interrupted=run.stop_wanted,
            )

    def meter(self, run: Run, parameters: Iterable[Tensor], *, flops: float, figures: Sequence[str]) -> Meter:
        """Figures of training; ``figures`` are more of the task's own."""
        about: dict[str, Any] = {"flops": flops, "peak": run.peak_flops(), "tokens": self.unit == "tokens"}
        if self.exact:
            about |= {"leaf": self.split.leaf, "leaves": self.split.accumulate}
        return Meter(run.accelerator, parameters, **about, figures=figures)

    def checkpoints(self, folder: Path, run: Run) -> Checkpoints:
        """The checkpoints of the run in ``folder``."""
        save = self.recipe.save
        how: dict[str, Any] = {"sync": save.sync, "max_failures": save.max_failures, "say": run.display.say}
        how |= {"origin": getattr(self.task, "origin", None), "patience": self.recipe.machine.patience}
        checkpoints = Checkpoints(folder / "checkpoints", run.accelerator, **how)
        if run.ranks == 1:  # of several, one that fails ends at once: its part will never come
            run.closing.callback(checkpoints.close)
        return checkpoints

    def tracking(
        self, folder: Path, run: Run, *, resumed: Mapping[str, Any] | None, step: int, graph: Any = None
    ) -> Tracking:
        """metrics.jsonl and the trackers, going on from what was ``resumed`` at ``step``."""
        return Tracking(
            run.accelerator,
            folder,
            project=self.recipe.name,
            config=self.recipe.resolved,
            resumed=resumed,
            step=step,
            graph=graph,
            say=run.display.say,
        )

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
