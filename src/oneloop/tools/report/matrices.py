"""The matrices of the report: confusion matrices and others that the metrics of a task compute."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from markupsafe import escape

from oneloop.tools.run_reader import Record

Matrix = dict[str, Any]
"""``rows`` and ``columns``, the names, and ``counts``, a list of numbers for each row"""

_OF_LABELS = ["true negative", "false positive", "false negative", "true positive"]


def matrices_of(examples: Mapping[str, Any]) -> dict[str, Matrix]:
    """Return the valid matrices in the content of examples.json, by name."""
    given = examples.get("matrices")
    valid = {}
    for name, table in given.items() if isinstance(given, dict) else ():
        checked = _checked(table)
        if checked:
            valid[str(name)] = checked
    return valid


def classes_of(run: Record) -> list[str]:
    """Return the names of classes that a run has recorded."""
    names: list[str] = []
    for table in matrices_of(run.examples).values():
        names += table["rows"]
    recorded = run.environment.get("recorded")
    classes = recorded.get("classes") if isinstance(recorded, Mapping) else None
    return names + (list(map(str, classes)) if isinstance(classes, list) else [])


def _checked(table: Any) -> Matrix | None:
    """Return a matrix of texts and finite numbers, or None if the content is invalid."""
    try:
        rows, columns = (list(map(str, table[key])) for key in ("rows", "columns"))
        counts = np.array(table["counts"])
    except (TypeError, ValueError, LookupError):
        return None
    is_numeric = counts.dtype.kind in "if" and np.isfinite(counts).all()
    if not is_numeric or not counts.size or counts.shape != (len(rows), len(columns)):
        return None
    return {"rows": rows, "columns": columns, "counts": counts.tolist()}


def heat_map(name: str, table: Matrix) -> tuple[str, dict[str, Any], tuple[str, str]]:
    """Return title, plotly's trace, and the titles of the x and the y axis of a matrix.

    The trace has the shares of each row, with the counts as text.

    Args:
        name: name of the metric.
        table: the matrix.
    """
    counts = np.array(table["counts"])
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.where(totals, totals, 1)

    # Shade a cell by its share; show its count. plotly interprets HTML in names.
    trace = {
        "x": list(map(escape, table["columns"])),
        "y": list(map(escape, table["rows"])),
        "z": shares.tolist(),
        "customdata": table["counts"],
    }
    if max(len(table["rows"]), len(table["columns"])) <= 20:
        trace["text"] = [list(map(_text, row)) for row in table["counts"]]
        trace["texttemplate"] = "%{text}"

    # Say what rows and columns are.
    title = f"{name.replace('_', ' ').capitalize()} of the validation set"
    if table["columns"] == _OF_LABELS:
        trace["hovertemplate"] = "%{y}, %{x}: %{customdata}<extra></extra>"
        return f"{title}: samples of each label", trace, ("", "label")
    return f"{title}: rows are the true classes", trace, ("predicted", "true")


def _text(count: float) -> str:
    if not count:
        return ""
    return str(count) if isinstance(count, int) else f"{count:.3g}"


def of_classes(table: Matrix) -> list[tuple[str, float, str, str, str]]:
    """Return for each class its name, its samples, precision, recall and F1.

    A dash stands for a number without samples to divide by. Only matrices whose columns are the
    classes of the rows, or the four counts of each label, have them.

    Args:
        table: the matrix, whose rows are the true classes.
    """
    counts = np.array(table["counts"])
    if table["columns"] == _OF_LABELS:
        _, wrong, missed, right = counts.T
    elif table["columns"] == table["rows"]:
        right = counts.diagonal()
        missed = counts.sum(axis=1) - right
        wrong = counts.sum(axis=0) - right
    else:
        return []
    lines = []
    for index, name in enumerate(table["rows"]):
        hits = right[index]
        samples = hits + missed[index]
        predicted = hits + wrong[index]
        f1 = _share(2 * hits, samples + predicted)
        lines.append((name, samples, _share(hits, predicted), _share(hits, samples), f1))
    return lines


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.4f}" if whole else "–"
