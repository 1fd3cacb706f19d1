"""The matrices of the report: confusion matrices and others that the metrics of a task compute."""

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import escape

from oneloop.tools.run_reader import Record, number

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
    if not isinstance(table, dict):
        return None
    names, columns, counts = (_list(table.get(key)) for key in ("rows", "columns", "counts"))
    if not names or not columns or len(counts) != len(names):
        return None

    rows = []
    for row in counts:
        if not isinstance(row, list) or len(row) != len(columns):
            return None
        numbers = list(map(number, row))
        if not all(map(math.isfinite, numbers)):
            return None
        rows.append([int(one) if one.is_integer() else one for one in numbers])
    return {"rows": list(map(str, names)), "columns": list(map(str, columns)), "counts": rows}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def heat_map(name: str, table: Matrix) -> tuple[str, dict[str, Any], tuple[str, str]]:
    """Return title, plotly's trace, and the titles of the x and the y axis of a matrix.

    The trace has the shares of each row, with the counts as text.

    Args:
        name: name of the metric.
        table: the matrix.
    """
    counts = table["counts"]
    shares = []
    for row in counts:
        total = sum(row)
        shares.append([count / total if total else 0 for count in row])

    # Shade a cell by its share; show its count. plotly interprets HTML in names.
    trace = {
        "x": list(map(escape, table["columns"])),
        "y": list(map(escape, table["rows"])),
        "z": shares,
        "customdata": counts,
    }
    if max(len(table["rows"]), len(table["columns"])) <= 20:
        trace["text"] = [[_text(count) for count in row] for row in counts]
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
    counts = table["counts"]
    found = []
    for index, name in enumerate(table["rows"]):
        if table["columns"] == _OF_LABELS:
            _, wrong, missed, right = counts[index]
            there = right + missed
            shown = right + wrong
        elif table["columns"] == table["rows"]:
            right = counts[index][index]
            there = sum(counts[index])
            shown = sum(row[index] for row in counts)
        else:
            return []
        precision = _share(right, shown)
        recall = _share(right, there)
        f1 = _share(2 * right, shown + there)
        found.append((name, there, precision, recall, f1))
    return found


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.4f}" if whole else "–"
