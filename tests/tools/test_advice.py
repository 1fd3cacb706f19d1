"""What the report derives from a run's log: goodput, and advice on time and batch size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oneloop.tools.report.advice import diagnosis, goodput, sentences
from oneloop.tools.run_reader import read_record

pytestmark = pytest.mark.covers(
    "oneloop.tools.report.advice",
    "oneloop.tools.run_reader",
)

OF_FOUR = {"workers": 0, "data_cores": 4}


@pytest.mark.parametrize(
    ("spent", "workers", "expected_text"),
    [
        (
            {"data": 31, "compute": 69},
            2,
            "31 % of the time the device waits for data: raise machine.workers from 2 to 4",
        ),
        (
            {"data": 75, "compute": 25},
            2,
            "from 2 to 8, and make the samples cheaper to load; 9 would be needed",
        ),
        ({"data": 90, "compute": 10}, 8, "all cores load already"),
        ({"data": 50, "compute": 50}, 0, "the device waits for data: raise machine.workers from 0"),
        ({"transfer": 40, "compute": 60}, 0, "send smaller types"),
        (
            {"evaluate": 50, "compute": 50},
            0,
            "50 % of the time goes into evaluation: evaluate 10 times less often (eval.every)",
        ),
        (
            {"save": 20, "compute": 80},
            0,
            "20 % of the time training waits for checkpoints: save 10 times less often",
        ),
        (
            {"compute": 90, "data": 10},
            0,
            "90 % of the time goes into forward and backward, as it should",
        ),
    ],
)
def test_what_the_times_mean(spent, workers, expected_text):
    assert expected_text in diagnosis(spent, {"workers": workers, "data_cores": 8})


def test_a_change_is_named_only_after_30_s_and_workers_only_for_free_cores():
    data = "50 % of the time the device waits for data"
    assert diagnosis({"data": 14.0, "compute": 14.0}, OF_FOUR) == data
    long = {"data": 16.0, "compute": 16.0}
    assert diagnosis(long, OF_FOUR) == f"{data}: raise machine.workers from 0 to 1"
    for about in ({"workers": 0, "data_cores": 0}, {}, {"workers": "a", "data_cores": None}):
        assert diagnosis(long, about) == f"{data}: make the samples cheaper to load"


def written(folder: Path, lines: list[dict], *, before: float = 0.0) -> Path:
    """Write the folder of a run that began 100 s before its end, at the time 1000."""
    folder.mkdir()
    starts = {"first": 900.0, "number": 2, "repeated": 7.0, "before": before, "stops": 0}
    files = {
        "environment.json": {"starts": starts, **OF_FOUR},
        "summary.json": {"seconds": 80.0 + before, "exit_code": 0},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "recipe.yaml").write_text("batch: {size: 64}\n")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def logged(step: int, time: float, **shares: float) -> dict:
    rest = {f"share/{phase}": share for phase, share in shares.items()}
    return {"step": step, "samples": step, "time": time, **rest}


@pytest.mark.parametrize("before", [0.0, 500.0])
def test_goodput_by_hand(tmp_path, before):
    lines = [
        logged(1, before + 20.0, data=0.5, compute=0.5),
        {"step": 1, "event": "save"},
        logged(2, before + 60.0, data=0.1, save=0.05, compute=0.85),
        {"step": 2, "samples": 2, "eval/loss": 1.0, "weights": "raw"},
    ]
    run = read_record(written(tmp_path / "run", lines, before=before))
    found = goodput(run, now=1000.0)
    assert found["lost"] == pytest.approx({"start": 13, "repeated": 7, "data": 14, "save": 2})
    assert found["seconds"] == 100.0 and found["share"] == pytest.approx(0.64)
    assert found["about"].startswith("goodput 64.0 % of 100 s since the first of 2 starts; lost: ")
    assert "14.0 % waiting for data, 2.0 % saving" in found["about"]

    # The sentences also name it, unless the user has stopped the run.
    run.summary["goodput"] = found
    time = "23 % of the time the device waits for data: raise machine.workers from 0 to 1"
    assert [*sentences(run)] == [time, found["about"]]
    run.summary["goodput"] = {**found, "stops": 1}
    assert len([*sentences(run)]) == 1


def test_the_batch_size_is_compared_with_the_last_noise_scale(tmp_path):
    lines = [
        {**logged(1, 1.0), "train/noise_scale": 9.0},
        {**logged(2, 2.0), "train/noise_scale": 900.0},
    ]
    run = read_record(written(tmp_path / "run", lines))
    first, *_ = sentences(run)
    assert first.startswith("noise scale: critical batch about 900; you use 64: up")


def test_a_damaged_folder_has_fewer_sentences(tmp_path):
    lines = [{**logged(1, 1.0), "share/data": "nan", "train/noise_scale": "inf"}]
    folder = written(tmp_path / "run", lines)
    for name in ("environment.json", "summary.json", "recipe.yaml"):
        (folder / name).write_text("[1]")
    assert [*sentences(read_record(folder))] == []
