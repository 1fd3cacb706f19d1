"""What a run's log says about its time and its batch size: goodput, and advice in sentences."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from oneloop.basics.exit_codes import STOPPED
from oneloop.show.terminal import metric
from oneloop.tools.run_reader import Record, entries, number

_SIGNIFICANT = 0.15  # share of the time from which something is worth a sentence
_LONG_ENOUGH = 30.0  # seconds of training from which changing a setting can pay
_CAUSES = {
    "start": "starts",
    "repeated": "repeated steps",
    "data": "waiting for data",
    "save": "saving",
}
"""causes of lost time, and how a sentence names them"""


def goodput(run: Record, *, now: float) -> dict[str, Any]:
    """Return how much of the time since the first start was useful.

    Useful is what went into kept steps and evaluations. Time after the last log line of a killed
    start counts as start.

    Args:
        run: has ended.
        now: seconds since 1970.

    Returns:
        For summary.json: ``share``, ``seconds`` (since the first start), ``lost`` (seconds by
        cause), ``stops`` (starts that ended by a requested stop), and ``about`` (a
        sentence).
    """
    starts = run.environment["starts"]
    repeated = starts["repeated"]
    kept = run.summary["seconds"] - starts["before"]
    seconds = max(now - starts["first"], kept + repeated, 1e-9)
    lost = {"start": seconds - kept - repeated, "repeated": repeated}
    for phase in ("data", "save"):
        lost[phase] = run.spent.get(phase, 0.0)
    share = 1 - sum(lost.values()) / seconds

    # Say it in a sentence.
    causes = [f"{value / seconds:.1%} {_CAUSES[cause]}" for cause, value in lost.items()]
    about = (
        f"goodput {share:.1%} of {seconds:,.0f} s since the first of {starts['number']} "
        f"starts; lost: {', '.join(causes)}"
    )
    return {
        "share": share,
        "seconds": seconds,
        "lost": lost,
        "stops": starts["stops"],
        "about": about.replace("%", " %"),
    }


def sentences(run: Record) -> Iterator[str]:
    """Yield the sentences about the run's time and batch size."""
    for value in run.curve("train/noise_scale")[1][-1:]:
        batch = number(entries(run.recipe.get("batch")).get("size"))
        if math.isfinite(value) and math.isfinite(batch):
            yield meaning(value, int(batch))
    if run.spent:
        yield diagnosis(run.spent, run.environment)

    # One start has nothing to compare. After a requested stop, the time until the next start is
    # not lost.
    found = entries(run.summary.get("goodput"))
    about = str(found.get("about", ""))
    stopped = run.summary.get("exit_code") == STOPPED or found.get("stops", 0) != 0
    if about and " 1 starts" not in about and not stopped:
        yield about


def results(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines at the end: samples and time, the best evaluation, and final/."""
    if summary.get("samples") and summary.get("seconds"):
        rate = summary["samples"] / summary["seconds"]
        seconds = f"{summary['seconds']:,.1f} s"
        yield f"{summary['samples']:,} samples in {seconds}, {rate:,.0f} samples/s on average"

    best = summary.get("best") or {}
    if best.get("value") is not None:
        yield f"best {best['metric']}: {metric(best['value'])} at step {best['step']:,}"
    final = summary.get("final") or {}
    if final and not summary.get("exit_code"):
        about = f"final/ holds the {final['weights']} weights, of step {final['step']:,}"

        # Was the best evaluation well before the end?
        if final["weights"] == "last" and 0 < (best.get("step") or 0) < 0.9 * final["step"]:
            about += "; --save.final best keeps those of the best evaluation"
        yield about


def diagnosis(spent: Mapping[str, float], environment: Mapping[str, Any]) -> str:
    """Return the largest part of the time that a setting could spare, and what to change.

    Without such a part, the model itself fills the time. A change follows after a colon,
    if the run took :data:`_LONG_ENOUGH`.

    Args:
        spent: Seconds by phase of a :class:`~oneloop.measure.clock.Clock`.
        environment: The content of environment.json: ``workers`` of each process, and
            ``data_cores`` that could load data (0: they train).
    """
    seconds = sum(spent.values()) or 1.0
    shares = {phase: value / seconds for phase, value in spent.items()}
    evaluate = math.ceil(shares.get("evaluate", 0.0) / 0.05)
    save = math.ceil(shares.get("save", 0.0) / 0.02)

    # Of each phase: where the time goes, and what to change.
    advice = {
        "data": (
            "the device waits for data",
            _more_workers(shares.get("data", 0.0), environment),
        ),
        "transfer": (
            "the device waits for the copy of batches",
            "send smaller types (pixels as uint8, tokens as int32) and convert them in the model",
        ),
        "update": (
            "goes into the optimizer's update",
            "a larger batch.size has fewer updates; adamw and sgd are fused, others may not be",
        ),
        "evaluate": (
            "goes into evaluation",
            f"evaluate {evaluate} times less often (eval.every), or raise eval.micro",
        ),
        "save": ("training waits for checkpoints", f"save {save} times less often (save.every)"),
    }
    largest = max(advice, key=lambda phase: shares.get(phase, 0.0))
    share = shares.get(largest, 0.0)
    if share < _SIGNIFICANT:
        compute = shares.get("compute", 0.0)
        verdict = ", as it should" if compute > 0.5 else "; no other part of a step takes long"
        return f"{100 * compute:.0f} % of the time goes into forward and backward{verdict}"
    what, change = advice[largest]
    sentence = f"{100 * share:.0f} % of the time {what}"
    return f"{sentence}: {change}" if seconds >= _LONG_ENOUGH else sentence


def _more_workers(share: float, environment: Mapping[str, Any]) -> str:
    """Return advice for this share of time spent waiting: more workers, or cheaper samples."""
    workers = number(environment.get("workers"))
    cores = number(environment.get("data_cores"))
    if not (cores > 0 and workers >= 0):
        return "make the samples cheaper to load"
    times = 1.0 / (1.0 - min(share, 0.95))  # factor of the load rate that removes the wait
    needed = math.ceil(workers * times) + 1 if workers else math.ceil(share * times)
    if workers >= min(needed, cores):
        return "all cores load already; store the samples in a form that is cheaper to load"
    change = f"raise machine.workers from {workers:.0f} to {min(needed, cores):.0f}"
    if needed > cores:
        change += f", and make the samples cheaper to load; {needed} would be needed"
    return change


def meaning(value: float, batch: int) -> str:
    """Return a sentence about the noise scale.

    Args:
        value: B_simple in samples.
        batch: Global batch size.
    """
    critical = float(f"{value:.2g}")
    sentence = f"noise scale: critical batch about {critical:,.0f}; you use {batch:,}"
    if critical >= 1.5 * batch:
        times = float(f"{critical / batch:.2g}")
        decimals = 0 if times >= 10 else 1
        factor = f"{times:,.{decimals}f}x"
        return f"{sentence}: up to {factor} larger batches cost little data efficiency"
    if critical <= batch / 1.5:
        share = f"1/{batch / critical:,.0f}"
        return f"{sentence}: batches down to {share} of it would need fewer samples, and more steps"
    return f"{sentence}: that is about right"
