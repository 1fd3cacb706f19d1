"""The end of a run: which weights ``final/`` gets, the last evaluation, and the summary."""

from typing import Any

from oneloop.basics import exit_codes
from oneloop.basics.heartbeats import BEATS, ENDING
from oneloop.checks.repeats import Checks
from oneloop.loop.evaluations import evaluate
from oneloop.loop.training_state import State
from oneloop.run.final_weights import FinalWeights, load_task_state, write_final


def end(state: State, checks: Checks, *, stopped: bool) -> dict[str, Any]:
    """End a run that is done or stopped; return the summary. Collective: call on every rank.

    Args:
        state: of the run.
        checks: compare tensors before and after the evaluation.
        stopped: whether a stop ended the run. Its final weights are the last ones, and it is not
            evaluated.

    Raises:
        OSError: the run was stopped, and its last checkpoint could not be written.
    """
    # Wait for the last checkpoint, and write final/ (the best weights if the recipe asks for them).
    failed = state.checkpoints.finish()
    BEATS.enter(ENDING)
    final = _final_weights(state, stopped=stopped)
    state.checkpoints.close()
    folder = state.folder.path / "final"
    write_final(folder, state.model, state.job.task, state.emas, about=final.as_json())

    # Evaluate on the test set; on all sets if the weights of an earlier step were restored, so that
    # the summary describes the weights in final/. A stop also ends this evaluation.
    sets = state.job.eval_sets
    if final.step == final.end:
        sets = {name: dataset for name, dataset in sets.items() if name == "test"}
    if sets and not stopped:
        stopped = not evaluate(state, checks, sets, of=final.step)
    if failed and stopped:  # the run is not done, and cannot be resumed from where it was
        raise OSError("the run was stopped, but the last checkpoint could not be written")
    return _summary(state, final, stopped=stopped)


def _final_weights(state: State, *, stopped: bool) -> FinalWeights:
    """Restore the weights of the best evaluation, if the recipe asks for them.

    The last weights stay if the checkpoint of the best ones is not intact. Return which weights the
    model has.
    """
    recipe = state.job.recipe
    best = state.best
    step = state.count.step
    last = FinalWeights("last", step=step, end=step)
    if recipe.save.final != "best" or not best.step or stopped:
        return last

    # Load the weights of an earlier step, if its checkpoint is intact.
    if best.step != step:
        folder = state.checkpoints.whole(best.step, "final/ gets the last weights")
        if folder is None:
            return last
        state.take(folder)
        load_task_state(state.job.task, folder)
    return FinalWeights("best", best.step, step, metric=recipe.eval.metric, value=best.value)


def _summary(state: State, final: FinalWeights, *, stopped: bool) -> dict[str, Any]:
    """Return the summary (summary.json) of a run that is done or stopped."""
    job = state.job
    count = state.count
    best = state.best

    # Say why the run ended.
    code = exit_codes.DONE
    if stopped:
        reason = f"stopped by {state.run.stopping.by or 'a signal to another rank'}"
        code = exit_codes.STOPPED
    elif count.step < job.steps:
        reason = f"early stop: {best.metric} was best at step {best.step}"
    else:
        reason = "done"

    return {
        "exit_reason": reason,
        "exit_code": code,
        **count.as_metrics(job.unit),
        "passed_over": count.passed_over,
        "seconds": count.elapsed(),
        **count.results,
        "best": {
            "metric": best.metric,
            "value": best.value,
            "step": best.step,
            "larger_is_better": best.upward,
        },
        "final": final.as_json(),
    }
