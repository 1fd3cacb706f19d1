"""Rare work between steps and at the end: log, evaluate, compare replicas, handle bad steps."""

import gc
from collections.abc import Collection, Sequence

from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.bad_steps import BadStepHandler
from oneloop.loop.counters import RunLog
from oneloop.loop.ending import Ending
from oneloop.loop.evaluations import Evaluations
from oneloop.loop.gradients import Gradients
from oneloop.loop.log_steps import LogSteps
from oneloop.loop.steps import Steps
from oneloop.loop.training_state import State
from oneloop.machine.replicas import check_replicas


class Upkeep:
    """What a run does between steps, while no step is pending; and at its end.

    All methods are collective: call them on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        state: what a checkpoint holds.
        run_log: metrics.jsonl, the trackers and the terminal.
        gradients: measure device time and noise scale of a log step.
        steps: load the micro-batches.
        emas: EMAs of the weights.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        state: State,
        run_log: RunLog,
        gradients: Gradients,
        steps: Steps,
        emas: Sequence[EMA],
    ) -> None:
        self._job = job
        self._state = state
        self.log = LogSteps(job, run, state, run_log, gradients, steps, emas)
        self.evaluations = Evaluations(job, run, state, run_log, gradients, emas)
        self.bad_steps = BadStepHandler(job, run, state, run_log, steps, self.evaluations)
        self.ending = Ending(job, run, state, self.evaluations, emas, self.log.advice)

    def over(self) -> bool:
        """Return whether the run has reached its last step, or stops early (``stop.patience``)."""
        return self._state.count.step >= self._job.steps or self.evaluations.patience_is_over()

    def work(self, due: Collection[str], lr: float, total: float) -> bool:
        """Do what is due after a step, except saving.

        Args:
            due: names of intervals: log, check, collect, eval.
            lr: learning rate of the step.
            total: weight of the step's global batch.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        state = self._state
        if "log" in due:
            self.log.write(lr, total)
        if "check" in due:
            check_replicas(state.model, state.optimizer, step=state.count.step)
        if "collect" in due:
            gc.collect()
        state.meter.clock.mark("other")
        return "eval" not in due or self.evaluations.validate()
