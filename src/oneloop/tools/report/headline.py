"""The results of runs, at the top of the report: cards of one run, a table of several."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from oneloop.tools.report.charts import constant
from oneloop.tools.run_reader import Record, differences, entries, number

_KEYS = 8  # differing keys in the table of several runs, at most


def headline(run: Record) -> str:
    """Return in a sentence how a run ended, on which device, and which weights were evaluated."""
    summary = run.summary
    reason = summary.get("exit_reason")
    if not reason:
        reason = "not begun" if run.last is None else f"at step {run.last:,}"
    final = entries(summary.get("final"))
    if final and not summary.get("exit_code"):
        raw = " raw" if len(run.weights()) > 1 else ""
        of = f"{final.get('weights')}{raw} weights, of step {final.get('step')}"
        device = f", on {run.environment['device']}" if "device" in run.environment else ""
        reason = f"{reason}{device}; eval (validation) and test metrics: {of}"
    return str(reason)


def trained(run: Record) -> str:
    """Return in one sentence what a run trained, as far as its recipe is there."""
    task = entries(run.recipe.get("task"))
    if not task.get("name"):
        return ""
    words = [f"task {task['name']}"]
    for key in ("model", "data"):
        if isinstance(task.get(key), str):
            words.append(f"{key} {task[key]}")
    words.append(f"duration {run.recipe.get('duration')}")
    for group, key in (("batch", "size"), ("optimizer", "name"), ("optimizer", "lr")):
        value = entries(run.recipe.get(group)).get(key)
        if value is not None:
            words.append(f"{group}.{key} {value}")
    return ", ".join(words)


def cards(run: Record) -> Iterator[tuple[str, str]]:
    """Yield name and value of each number of a run."""
    # Begin with the metric by which the run was judged.
    summary = run.summary
    best = entries(summary.get("best"))
    if best.get("value") is not None:
        metric = str(best.get("metric")).replace("/", " ")
        if len(run.weights()) > 1:
            metric += " (raw)"
        yield f"best {metric}, at step {best.get('step')}", short(best["value"])
    for name, value in summary.items():
        if ("eval/" in name or "test/" in name) and isinstance(value, float):
            yield name.replace("/", " ").replace("_", " "), short(value)
    for name in ("step", "samples", "tokens"):
        if name in summary:
            yield name, f"{number(summary[name]):,.0f}"
    if "seconds" in summary:
        yield "time", f"{number(summary['seconds']):,.0f} s"
    rate = constant(run, "train/lr")
    if rate is not None:
        yield "learning rate", short(rate)


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


def comparison(ranking: Ranking) -> tuple[list[str], list[list[Any]]]:
    """Return head and rows of the table of several runs."""
    metric, upward, runs = ranking
    changed = {key: values for key, *values in differences(runs)}
    shown = list(changed)[:_KEYS]
    every = dict.fromkeys(name for run in runs for name in run.metrics())
    names = [name for name in every if name.startswith(("eval/", "test/"))]
    head = ["run", *([f"best {metric}"] if metric else []), *shown]
    head += [*names, "step", "seconds", "end"]

    rows = []
    for index, run in enumerate(runs):
        row: list[Any] = [run.name]
        if metric:
            row.append(_or_dash(best(run, metric, upward)))
        row += [changed[key][index] for key in shown]
        for name in names:
            values = run.curve(name, "raw")[1]
            row.append(_or_dash(values[-1] if values else math.nan))
        step = "–" if run.last is None else f"{run.last:,}"
        seconds = _or_dash(number(run.summary.get("seconds")))
        end = run.summary.get("exit_reason") or "not yet"
        rows.append([*row, step, seconds, end])
    return head, rows


def _or_dash(value: float) -> Any:
    return "–" if math.isnan(value) else value


def short(value: Any) -> str:
    """Return a text for a cell: a float has four digits."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
