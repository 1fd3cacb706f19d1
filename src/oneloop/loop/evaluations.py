"""An evaluation during a run or at its end."""

from collections.abc import Mapping
from typing import Any

from oneloop.basics.heartbeats import BEATS, EVALUATION
from oneloop.basics.houses import tool
from oneloop.checks.repeats import Checks
from oneloop.evaluation import evaluate_all
from oneloop.loop.training_state import State
from oneloop.machine.torch_settings import release_cache
from oneloop.task_protocol.generated import Generation


def evaluate(
    state: State, checks: Checks, sets: Mapping[str, Any], *, of: int | None = None
) -> bool:
    """Evaluate weights and EMA weights, and log the results. Collective: call on every rank.

    Args:
        state: of the run.
        checks: compare tensors before and after the evaluation.
        sets: the data sets by name.
        of: the step that the weights are from, at the end of a run. Then only test metrics are
            logged: the others were logged at that step. None: the current step.

    Returns:
        False if a stop was requested before the evaluation was complete.
    """
    job = state.job
    run = state.run
    recipe = job.recipe
    micro = recipe.eval.micro

    # Collect examples of predictions, except of the test set alone.
    examples = None
    collecting = tool("examples")
    if collecting is not None and sets.keys() - {"test"}:
        examples = collecting.Examples(recipe.eval.samples)

    state.checkpoints.poll()  # an evaluation may take long: the last save must not wait for it
    with BEATS.phase(EVALUATION), checks.unchanged("an evaluation"):
        results = evaluate_all(
            job.task,
            state.model,
            sets,
            emas=state.emas,
            examples=examples,
            accelerator=run.accelerator,
            micro=micro or job.layout.each,
            workers=run.workers(recipe.machine.workers),
            dtype=job.dtype,
            seed=recipe.seed,
            exact=job.exact,
            interrupted=run.stop_wanted,
            window=job.layout.size,
            pinned=recipe.machine.pinned,
            generation=Generation.of(recipe.eval.generate, micro),
        )
    if results is None:
        return False

    # Log the results of each kind of weights (raw, or the name of an EMA), and the examples.
    step = state.count.step if of is None else of
    if examples is not None:
        state.tracking.show(step, examples)
    for weights, metrics in results.items():
        head = "" if weights == "raw" else f"{weights}/"
        state.count.results |= {head + name: value for name, value in metrics.items()}
        new = metrics
        if of is not None:
            new = {name: value for name, value in metrics.items() if name.startswith("test/")}
        if new:
            state.write({"step": step, **new, "weights": weights})
        run.display.results(step, metrics, weights)

    # Release memory that was cached for shapes that only the evaluation has.
    if micro not in (None, job.layout.each):
        release_cache()
    state.meter.clock.mark("evaluate")
    return True
