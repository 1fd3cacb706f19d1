"""Evaluations during a run and at its end: of which sets, the best one, and early stopping."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from oneloop.basics.heartbeats import BEATS, EVALUATION
from oneloop.checkpoint.store import Keep
from oneloop.ema import EMA
from oneloop.evaluation import evaluate_all
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.loop.counters import RunLog
from oneloop.loop.gradients import Gradients
from oneloop.loop.training_state import State
from oneloop.machine.torch_settings import release_cache
from oneloop.show.examples import Examples


class Evaluations:
    """Evaluates the model and its EMAs, and keeps the best evaluation.

    All evaluations are collective: call them on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        state: the model, and the best evaluation so far.
        run_log: metrics.jsonl, the trackers and the terminal.
        gradients: their checks ensure that an evaluation changes no weights.
        emas: EMAs of the weights.
    """

    def __init__(
        self,
        job: Job,
        run: Run,
        state: State,
        run_log: RunLog,
        gradients: Gradients,
        emas: Sequence[EMA],
    ) -> None:
        self._job = job
        self._run = run
        self._state = state
        self._run_log = run_log
        self._gradients = gradients
        self._emas = emas
        self._workers = run.workers(job.recipe.machine.workers)

    def validate(self) -> bool:
        """Evaluate on the validation sets and compare with the best evaluation so far.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        state = self._state
        job = self._job
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
        job = self._job
        run = self._run
        state = self._state
        config = job.recipe.eval

        # Collect examples of predictions, except of the test set alone.
        examples = None
        if sets.keys() - {"test"}:
            examples = Examples(fixed=config.samples, worst=config.samples)

        run.be_patient()
        state.checkpoints.poll()  # an evaluation may take long: the last save must not wait for it
        contents = self._gradients.checks.contents
        unchanged = nullcontext() if contents is None else contents.unchanged("an evaluation")
        with BEATS.phase(EVALUATION), unchanged:
            metrics = evaluate_all(
                job.task,
                state.model,
                sets,
                emas=self._emas,
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
            )
        if metrics is None:
            return False
        self._run_log.evaluated(metrics, examples, of=of)

        # Release memory that was cached for shapes that only the evaluation has.
        if config.micro not in (None, job.layout.each):
            release_cache()
        state.meter.clock.mark("evaluate")
        return True

    def best(self) -> dict[str, Any]:
        """Return the best evaluation so far, as the manifest of a checkpoint records it."""
        best = self._state.best
        return {"metric": best.metric, "value": best.value, "step": best.step, "since": best.since}

    def kept(self) -> Keep:
        """Return which older checkpoints a save keeps."""
        save = self._job.recipe.save
        return Keep(
            newest=save.keep,
            every=self._job.intervals.forever,
            best=self._state.best.step if save.best else None,
        )

    def is_best(self) -> bool:
        """Return whether this step has the best evaluation so far, and the recipe saves it."""
        return self._job.recipe.save.best and self._state.best.step == self._state.count.step

    def patience_is_over(self) -> bool:
        """Return whether the run stops early (``stop.patience``)."""
        return 0 < self._job.recipe.stop.patience <= self._state.best.since
