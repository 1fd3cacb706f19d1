"""The intervals of a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from endings import RECIPE, faulty
from oneloop.basics.duration import Scale
from oneloop.job.build import _intervals
from oneloop.recipe.parse import recipe

pytestmark = pytest.mark.covers("oneloop.job.build", "oneloop.recipe.schema")


@pytest.mark.parametrize("steps", [1, 7, 39, 40, 79, 100, 787, 1999, 2000, 10**6])
def test_a_short_run_has_forty_log_lines(steps):
    intervals = _intervals(recipe("digits", log={"every": "auto"}), Scale(64, 1000), steps)
    due = [step for step in range(1, min(steps, 5000) + 1) if intervals.is_due("log", step)]
    assert len(due) >= min(steps, 40)
    assert (intervals.every["log"] == 50) == (steps >= 2000)
    assert len(due) <= 100 and intervals.every["log"] <= 50


def test_a_typed_duration_replaces_auto():
    for given, every in (("5%", 50), (7, 7), (0, 1)):
        intervals = _intervals(recipe("digits", log={"every": given}), Scale(64, 1000), 1000)
        assert intervals.every["log"] == every
    assert recipe(task="image_classification").log.every == "auto"


def logged(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "train/loss" in line]


def test_a_resumed_run_logs_at_the_same_steps(tmp_path):
    folders = [tmp_path / name for name in ("whole", "stopped")]
    for folder in folders:
        folder.mkdir()
        (folder / "f.yaml").write_text(RECIPE)
    words = ["--log.every", "auto", "--duration", "100", "--save.every", "50"]
    faulty(folders[0], *words).ok()
    stopped = faulty(folders[1], *words, "--stop.after", "0s")
    assert stopped.codes == [75], stopped.output
    assert logged(folders[1]) != logged(folders[0]) == list(range(2, 102, 2))
    faulty(folders[1], *words).ok()
    assert logged(folders[1]) == logged(folders[0])
