"""Evaluations during a run and at its end: of which sets, the best one, and early stopping."""

from collections.abc import Mapping
from typing import Any

from oneloop.basics.heartbeats import BEATS, EVALUATION
from oneloop.checkpoint.retention import Keep
from oneloop.evaluation import evaluate_all
from oneloop.loop.parts import Parts
from oneloop.machine.torch_settings import release_cache
from oneloop.show.examples import Examples
from oneloop.task_protocol.generated import Generation


class Evaluations:
    """Evaluates the model and its EMAs, and keeps the best evaluation.

    All evaluations are collective: call them on every rank.

    Args:
        parts: of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._workers = parts.run.workers(parts.job.recipe.machine.workers)

    def validate(self) -> bool:
        """Evaluate on the validation sets and compare with the best evaluation so far.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        state = self._parts.state
        job = self._parts.job
        sets = {name: dataset for name, dataset in job.eval_sets.items() if name != "test"}
        if not sets:
            return True

        # Evaluate. If a stop prevents it, the checkpoint records that it is still due.
        state.count.evaluation_due = True
        if not self.evaluate(sets):
            return False
        state.count.evaluation_due = False

        # Judge the result, for early stopping, the best checkpoint and the plateau schedule.
        value = state.results[job.recipe.eval.metric]
        better = state.best.update(value, state.count.step)
        state.count.evaluated(better, patience=job.rate.patience)
        return True

    def evaluate(self, sets: Mapping[str, Any], of: int | None = None) -> bool:
        """Evaluate weights and EMA weights.

        Args:
            sets: the data sets by name.
            of: the step that the weights are from, at the end of a run; None: the current step.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        job = self._parts.job
        run = self._parts.run
        state = self._parts.state
        config = job.recipe.eval

        # Collect examples of predictions, except of the test set alone.
        examples = None
        if sets.keys() - {"test"}:
            examples = Examples(config.samples)

        run.be_patient()
        state.checkpoints.poll()  # an evaluation may take long: the last save must not wait for it
        with BEATS.phase(EVALUATION), self._parts.checks.unchanged("an evaluation"):
            metrics = evaluate_all(
                job.task,
                state.model,
                sets,
                emas=self._parts.state.emas,
                examples=examples,
                accelerator=run.accelerator,
                micro=config.micro or job.layout.each,
                workers=self._workers,
                dtype=job.dtype,
                seed=job.recipe.seed,
                exact=job.exact,
                interrupted=run.stop_wanted,
                window=job.layout.size,
                pinned=job.recipe.machine.pinned,
                generation=Generation.of(config.generate, config.micro),
            )
        if metrics is None:
            return False
        self._parts.run_log.evaluated(metrics, examples, of=of)

        # Release memory that was cached for shapes that only the evaluation has.
        if config.micro not in (None, job.layout.each):
            release_cache()
        state.meter.clock.mark("evaluate")
        return True

    def best(self) -> dict[str, Any]:
        """Return the best evaluation so far, as the manifest of a checkpoint records it."""
        best = self._parts.state.best
        return {"metric": best.metric, "value": best.value, "step": best.step, "since": best.since}

    def kept(self) -> Keep:
        """Return which older checkpoints a save keeps."""
        job = self._parts.job
        save = job.recipe.save
        best = self._parts.state.best.step if save.best else None
        return Keep(newest=save.keep, every=job.intervals.forever, best=best)

    def is_best(self) -> bool:
        """Return whether this step has the best evaluation so far, and the recipe saves it."""
        state = self._parts.state
        return self._parts.job.recipe.save.best and state.best.step == state.count.step

    def patience_is_over(self) -> bool:
        """Return whether the run stops early (``stop.patience``)."""
        return 0 < self._parts.job.recipe.stop.patience <= self._parts.state.best.since
