"""Rare work between steps and at the end: log, evaluate, compare replicas, handle bad steps."""

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from oneloop.checks.replicas import check_replicas
from oneloop.data.skipped_rows import SKIPPED_ROWS
from oneloop.loop.bad_steps import BadStepHandler
from oneloop.loop.ending import Ending
from oneloop.loop.evaluations import Evaluations
from oneloop.loop.log_steps import LogSteps
from oneloop.loop.parts import Parts
from oneloop.machine.torch_settings import scheduled_garbage
from oneloop.measure.profiling import Profiling


class Upkeep:
    """What a run does between steps, while no step is pending; and at its end.

    All methods are collective: call them on every rank.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.log = LogSteps(parts)
        self.evaluations = Evaluations(parts)
        self.bad_steps = BadStepHandler(parts, self.evaluations)
        self.ending = Ending(parts, self.evaluations)

    @contextmanager
    def around_steps(self, folder: Path) -> Iterator[Profiling]:
        """Profile the steps that the recipe names, and let Python collect garbage only when due.

        List the samples that are left out while they are read.

        Args:
            folder: the run folder.
        """
        run = self._parts.run
        skipped = folder / "skipped_rows" / f"rank-{run.rank}.jsonl"
        SKIPPED_ROWS.begin(skipped, run.display.say if run.main else None)
        with self.log.profiling(folder) as profiling, scheduled_garbage():
            yield profiling

    def over(self) -> bool:
        """Return whether the run has reached its last step, or stops early (``stop.patience``)."""
        return (
            self._parts.state.count.step >= self._parts.job.steps
            or self.evaluations.patience_is_over()
        )

    def work(self, due: Collection[str], lr: float, total: float) -> bool:
        """Do what is due after a step, except saving.

        Args:
            due: names of intervals: log, check, collect, eval.
            lr: learning rate of the step.
            total: weight of the step's global batch.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        state = self._parts.state
        if "log" in due:
            self.log.write(lr, total)
        if "check" in due:
            check_replicas(state.model, state.optimizer, step=state.count.step)
        if "collect" in due:
            gc.collect()
        state.meter.clock.mark("other")
        return "eval" not in due or self.evaluations.validate()
