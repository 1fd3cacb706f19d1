"""Cases of a test of which some are slow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def with_slow(cases: Iterable[Any], slow: Collection[Any]) -> list[Any]:
    """Return the cases as parameters of a test; those in ``slow`` are marked slow."""
    parameters = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = [pytest.mark.slow] if case in slow else []
        parameters.append(pytest.param(*values, marks=marks))
    return parameters
