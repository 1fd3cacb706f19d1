"""Rare work between steps and at the end: log, evaluate, compare replicas, handle bad steps."""

import gc
from collections.abc import Collection

from oneloop.loop.bad_steps import BadStepHandler
from oneloop.loop.ending import Ending
from oneloop.loop.evaluations import Evaluations
from oneloop.loop.log_steps import LogSteps
from oneloop.loop.parts import Parts
from oneloop.machine.replicas import check_replicas


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
        self.ending = Ending(parts, self.evaluations, self.log.advice)

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
