"""What a run says of itself after its last step: summary.json."""

from __future__ import annotations

from typing import Any

from oneloop.basics import errors
from oneloop.measure.noise_scale import NoiseScale, meaning
from oneloop.run.counters import Best, Counters, Results
from oneloop.run.job import Job
from oneloop.run.processes import Run


def summary(
    job: Job,
    run: Run,
    count: Counters,
    best: Best,
    results: Results,
    noise: NoiseScale,
    *,
    final: dict[str, Any],
    time: str,
    stopped: bool,
) -> dict[str, Any]:
    """The summary of a run that came to its end, or to a stop; ``noise_scale`` and ``time`` (where it went) are
    sentences, ``final`` says which weights final/ holds."""
    metric = job.recipe.eval.best
    early = f"early stop: {metric} was best at step {best.step}" if count.step < job.steps else "done"
    return {
        "exit_reason": f"stopped by {run.stopping.by or 'a signal to another rank'}" if stopped else early,
        "exit_code": errors.STOPPED if stopped else errors.DONE,
        **count.figures(job.unit),
        "passed_over": count.passed_over,
        "seconds": count.elapsed(),
        **results,
        "best": {"metric": metric, "value": best.value, "step": best.step},
        "final": final,
        "noise_scale": meaning(noise.value, job.split.size, job.no_noise_scale),
        "time": time,
    }
