"""The end of a run: which weights ``final/`` gets, the last evaluation, and the summary."""

from pathlib import Path
from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.heartbeats import BEATS, ENDING
from oneloop.loop.evaluations import Evaluations
from oneloop.loop.parts import Parts
from oneloop.run.final_weights import FinalWeights, load_task_state, write_final


class Ending:
    """Ends a run that is done or stopped. All methods are collective: call them on every rank.

    Args:
        parts: of the run.
        evaluations: evaluate the last weights.
    """

    def __init__(self, parts: Parts, evaluations: Evaluations) -> None:
        self._parts = parts
        self._evaluations = evaluations

    def final_weights(self, *, stopped: bool) -> FinalWeights:
        """Restore the weights of the best evaluation, if the recipe asks for them.

        The last weights stay if the checkpoint of the best ones is not intact. No save may be in
        progress.

        Args:
            stopped: whether a stop ended the run, which then keeps the last weights.

        Returns:
            Which weights the model has.
        """
        BEATS.enter(ENDING)
        self._parts.run.be_patient()
        state = self._parts.state
        recipe = self._parts.job.recipe
        best = state.best
        step = state.count.step
        last = FinalWeights("last", step=step, end=step)
        if recipe.save.final != "best" or not best.step or stopped:
            return last

        # Load the weights of an earlier step, if its checkpoint is intact.
        if best.step != step:
            folder = state.checkpoints.whole(best.step, "final/ gets the last weights", state.needs)
            if folder is None:
                return last
            state.take(folder)
            load_task_state(self._parts.job.task, folder)
        return FinalWeights(
            "best",
            step=best.step,
            end=step,
            metric=recipe.eval.metric,
            value=best.value,
        )

    def last_evaluation(self, final: FinalWeights) -> bool:
        """Evaluate on the test set; on all sets if the weights of an earlier step were restored.

        So the summary describes the weights in ``final/``.

        Returns:
            False if a stop was requested before the evaluation was complete.
        """
        sets = self._parts.job.eval_sets
        if final.step == final.end:
            sets = {name: dataset for name, dataset in sets.items() if name == "test"}
        return not sets or self._evaluations.evaluate(sets, of=final.step)

    def write_final(self, folder: Path, final: FinalWeights) -> None:
        """Write the weights and the EMA weights, which ``final`` describes, for inference."""
        state = self._parts.state
        task = self._parts.job.task
        write_final(folder, state.model, task, state.emas, about=final.as_json())

    def summary(self, final: FinalWeights, *, stopped: bool) -> dict[str, Any]:
        """Return the summary (summary.json) of a run that is done or stopped."""
        job = self._parts.job
        state = self._parts.state
        metric = job.recipe.eval.metric
        count = state.count
        best = state.best

        # Say why the run ended.
        code = exit_codes.DONE
        if stopped:
            reason = f"stopped by {self._parts.run.stopping.by or 'a signal to another rank'}"
            code = exit_codes.STOPPED
        elif count.step < job.steps:
            reason = f"early stop: {metric} was best at step {best.step}"
        else:
            reason = "done"

        return {
            "exit_reason": reason,
            "exit_code": code,
            **count.as_metrics(job.unit),
            "passed_over": count.passed_over,
            "seconds": count.elapsed(),
            **state.results,
            "best": {
                "metric": metric,
                "value": best.value,
                "step": best.step,
                "larger_is_better": best.upward,
            },
            "final": final.as_json(),
        }
