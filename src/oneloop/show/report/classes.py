"""How well each class is told, from a confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def of_classes(confusion: Mapping[str, Any]) -> list[tuple[str, int, str, str, str]]:
    """Return for each class its name, its samples, precision, recall and F1; a dash if there is nothing to divide by.

    The rows of ``counts`` are the true classes.
    """
    counts = confusion["counts"]
    found = []
    for number, name in enumerate(confusion["classes"]):
        right, there = counts[number][number], sum(counts[number])
        said = sum(row[number] for row in counts)
        found.append((name, there, _share(right, said), _share(right, there), _share(2 * right, said + there)))
    return found


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "–"
