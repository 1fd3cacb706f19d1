"""The results of several runs, at the top of the report: a table, the best run first."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from oneloop.tools.run_reader import Record, differences, entries


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
    """Return what the table of several runs shows: the ranking, the keys that differ, and metrics.

    A row of ``rows`` has the best value of a run, and the newest value of each metric of ``names``
    (a list, which is empty without one).
    """
    metric, upward, runs = ranking
    every = dict.fromkeys(name for run in runs for name in run.curves)
    names = [name for name in every if name.startswith(("eval/", "test/"))]
    rows = []
    for run in runs:
        newest = [run.curve(name, "raw")[1][-1:] for name in names]
        rows.append({"best": best(run, metric, upward), "newest": newest})
    return {
        "ranking": ranking,
        "changed": differences(runs),
        "names": names,
        "rows": rows,
    }


def short(value: Any) -> str:
    """Return a text for a cell: a float has four digits, and NaN is a dash."""
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "–"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
