"""The results of several runs, at the top of the report: a table, the best run first."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from oneloop.tools.run_reader import Record, differences, entries, number

_KEYS = 8  # differing keys in the table of several runs, at most


class Ranking(NamedTuple):
    """Runs in the order of a metric, the best one first."""

    metric: str  # empty: the runs have their own order
    larger_is_better: bool
    runs: list[Record]


def ranked(runs: Sequence[Record]) -> Ranking:
    """Rank runs by the metric of ``eval.best``.

    They keep their order if they have several such metrics, or if their files do not say whether
    larger is better.
    """
    metrics = {str(entries(run.recipe.get("eval")).get("best", "eval/loss")) for run in runs}
    metric = metrics.pop()
    upward = _larger_is_better(metric, runs)
    name = metric.removeprefix("max:").removeprefix("min:")
    if metrics or upward is None or all(math.isnan(best(run, name, upward)) for run in runs):
        return Ranking("", False, list(runs))

    # A run without the metric is last.
    def place(run: Record) -> tuple[bool, float]:
        value = best(run, name, upward)
        return math.isnan(value), -value if upward else value

    return Ranking(name, upward, sorted(runs, key=place))


def _larger_is_better(metric: str, runs: Sequence[Record]) -> bool | None:
    """Return whether a larger value of ``eval.best`` is better; None: not known."""
    if metric.startswith(("max:", "min:")):
        return metric.startswith("max:")
    for run in runs:
        known = entries(run.summary.get("best")).get("larger_is_better")
        if isinstance(known, bool):
            return known
    return False if metric == "eval/loss" else None


def best(run: Record, metric: str, larger_is_better: bool) -> float:
    """Return the best value of a metric in a run; NaN if it has none.

    Args:
        run: the run.
        metric: its name, of the raw weights; that of an EMA begins with the name of the EMA.
        larger_is_better: whether a larger value is better.
    """
    weights, name = "raw", metric
    if metric not in run.curves:
        weights, _, name = metric.partition("/")
    values = [value for value in run.curve(name, weights)[1] if not math.isnan(value)]
    if not values:
        return math.nan
    return max(values) if larger_is_better else min(values)


def comparison(ranking: Ranking) -> dict[str, Any]:
    """Return what the page shows of several runs: a table, and the keys that differ."""
    metric, upward, runs = ranking
    changed = differences(runs)
    shown = changed[:_KEYS]
    every = dict.fromkeys(name for run in runs for name in run.curves)
    names = [name for name in every if name.startswith(("eval/", "test/"))]
    title = "Runs"
    head = ["run"]
    if metric:
        which = "largest" if upward else "smallest"
        title = f"Runs, the best one first: by the {which} {metric}"
        head.append(f"best {metric}")
    head += [key for key, *_ in shown]
    head += [*names, "step", "seconds", "end"]

    rows = []
    for index, run in enumerate(runs, 1):
        row: list[Any] = [run.name]
        if metric:
            row.append(best(run, metric, upward))
        row += [values[index] for values in shown]
        for name in names:
            values = run.curve(name, "raw")[1]
            row.append(values[-1] if values else math.nan)
        step = "–" if run.last is None else f"{run.last:,}"
        seconds = number(run.summary.get("seconds"))
        end = run.summary.get("exit_reason") or "not yet"
        rows.append([*row, step, seconds, end])
    return {
        "title": title,
        "ranked": bool(metric),
        "head": head,
        "rows": rows,
        "changed_head": ["key", *(run.name for run in runs)],
        "changed": changed,
    }


def short(value: Any) -> str:
    """Return a text for a cell: a float has four digits, and NaN is a dash."""
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
