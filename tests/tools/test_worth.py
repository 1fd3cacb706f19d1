"""`oneloop worth`: real runs measure what each technique gains; a technique that fails is a line of
the table."""

from __future__ import annotations

import json
import math
import os
import time

import pytest
import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.cli import main
from oneloop.recipe.parse import read
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tools.prove.short_run import as_arguments
from oneloop.tools.worth.techniques import PRECISION, TECHNIQUES, Machine, keys, missing
from oneloop.tools.worth.worth import Runner, TimedRun, compare, list_faults, sentences, table

pytestmark = pytest.mark.covers(
    "oneloop.tools.worth.command",
    "oneloop.tools.server_context",
    "oneloop.tools.prove.short_run",
    "oneloop.tools.prove.recorded_run",
    "oneloop.tools.worth.techniques",
    "oneloop.tools.worth.worth",
)

SHORT = ["--rounds", "1", "--seconds", "0.01"]


class Fails(ImageClassification):
    """Digits that fail as requested if gradients are accumulated (in smaller micro-batches)."""

    def __init__(self, how: str = "raise", **others) -> None:
        super().__init__(**others)
        self.how = how

    def loss(self, model, batch):
        if model.training and 4 < len(batch["label"]) < 64:
            if self.how == "raise":
                raise RuntimeError("no such kernel")
            if self.how == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory")
            if self.how == "crash":
                os._exit(7)
            time.sleep(600)
        return super().loss(model, batch)


@pytest.mark.slow
def test_a_run_of_it_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # no cell is wrapped
    assert (
        main(
            ["worth", "digits", "--batch.size", "32", "--only", "fused,ema,clip,recompute", *SHORT]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "needs a model with blocks" in shown and "results in runs/worth-digits" in shown
    results = json.loads((tmp_path / "runs" / "worth-digits" / "worth.json").read_text())
    assert results["words"] == ["digits", "--batch.size", "32"] and results["rounds"] == 1
    rows = {row["name"]: row for row in results["techniques"]}
    assert list(rows) == ["fused", "ema", "clip", "recompute"]
    assert rows["ema"]["result"] == "bit-identical"
    assert rows["fused"]["result"].startswith("equal up to rounding") and rows["clip"][
        "result"
    ].startswith("different")
    for name in ("fused", "ema", "clip"):
        assert all(rows[name][kind]["median"] > 0 for kind in ("alone", "on top")), name
    assert (
        results["none"]["median"] > 0
        and results["none"]["peak"] > 0
        and results["control"]["median"] > 0
    )


@pytest.mark.parametrize(
    ("how", "expected_text"),
    [
        pytest.param("raise", "RuntimeError: no such kernel", marks=pytest.mark.slow),
        pytest.param("memory", "out of memory", marks=pytest.mark.slow),
        pytest.param("crash", "exit code 7", marks=pytest.mark.slow),
    ],
)
def test_what_fails_is_a_line_of_the_table(tmp_path, monkeypatch, how, expected_text):
    monkeypatch.chdir(tmp_path)
    typed = [
        "digits",
        "--task",
        "test_worth.Fails",
        "--task.how",
        how,
        "--batch.size",
        "64",
        "--only",
        "accumulation,clip",
    ]
    assert main(["worth", *typed, *SHORT, "--to", "out"]) == 0
    rows = {
        row["name"]: row
        for row in json.loads((tmp_path / "out" / "worth.json").read_text())["techniques"]
    }
    assert expected_text in rows["accumulation"]["fault"] and "alone" not in rows["accumulation"]
    assert rows["clip"]["alone"]["median"] > 0 and not rows["clip"]["fault"]


def test_a_table_is_drawn_also_where_all_together_fail():
    good = [TimedRun(rate=2.0, peak=3.0), TimedRun(rate=4.0, peak=5.0)]
    bad = [TimedRun(fault="out of memory")] * 2
    assert compare([good[0], bad[0]], good) == {"median": 1, "min": 1, "max": 1, "memory": -1}
    assert list_faults([*good, *bad]) == "out of memory"
    failed = compare(bad, good)
    assert all(map(math.isnan, failed.values()))
    row = {
        "name": "clip",
        "alone": compare(good, good),
        "on top": failed,
        "result": "",
        "fault": "",
    }
    results = {"steps": 9, "rounds": 2, "techniques": [row, {"name": "ema", "fault": "no"}]}
    results["none"] = results["control"] = compare(good, good) | {"peak": 4.0}
    results["all"] = failed | {"peak": math.nan, "fault": "out of memory"}
    assert "n/a" in sentences(results)[1] and "out of memory" in sentences(results)[1]
    columns = [list(column.cells) for column in table(results).columns]
    assert columns[1] == ["1.00x", ""] and columns[3] == ["n/a", ""] and columns[-1][1] == "no"


@pytest.mark.slow
def test_what_hangs_is_ended():
    words = ["digits", "--task", "test_worth.Fails", "--task.how", "hang", "--batch.size", "64"]
    began = time.monotonic()
    outcome = Runner(words, timeout=10.0)({"batch.micro": 16}, steps=3)
    assert "did not end within 10 s" in outcome.fault and time.monotonic() - began < 120
    # the next is none the worse
    assert Runner(words, timeout=200.0)({"batch.micro": 64}, steps=8).rate > 0


def test_a_short_run_gives_weights_and_times():
    runner = Runner(["digits", "--batch.size", "16"], timeout=200.0)
    weights = runner.weights({PRECISION: "no"})
    assert torch.equal(weights, runner.weights({}))
    assert not torch.equal(weights, runner.weights({PRECISION: "bf16"}))
    outcome = runner({}, steps=8)
    assert outcome.rate > 0 and outcome.peak > 100 and runner.machine.device


@pytest.mark.parametrize(
    ("typed", "expected_text"),
    [
        (
            ["worth", "digits", "--only", "magic"],
            "--only 'magic' is not a technique; known: fused, bf16",
        ),
        (["worth", "digits", "--rounds", "0"], "--rounds: must be a positive integer, got 0"),
        (["worth", "digits", "--seconds"], "--seconds: expected one argument"),
        (["worth", "digits", "--batch.siez", "3"], "unknown key 'batch.siez'"),
        (["worth"], "no recipe given"),
    ],
)
def test_bad_input_is_reported(capsys, typed, expected_text):
    assert main(typed) == 2
    assert expected_text in capsys.readouterr().err


def test_a_recipe_that_does_not_train_is_reported():
    from oneloop.tools.worth.worth import measured as worth

    with pytest.raises(BadInput, match="does not train"):
        worth(["digits", "--task", "test_worth.Unbuilt"], rounds=1)


class Unbuilt(ImageClassification):
    def model(self) -> nn.Module:
        raise ValueError("no model today")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_every_technique_is_keys_of_the_recipe_or_a_reason(device):
    recipe = read(["gpt"])
    machine = Machine(device=device, cores=4, blocks=True, convolutions=False)
    keys_of = keys(recipe, machine)
    assert list(keys_of) == list(TECHNIQUES)
    for name in TECHNIQUES:
        reason = missing(name, recipe, machine)
        if reason:
            assert name in {"channels_last", "pinned", "fp16"} and reason.startswith("needs")
            continue
        on, off = keys_of[name]
        assert on.keys() == off.keys() and on != off
        for side in (on, off):
            side.pop(PRECISION, None)  # it is an option of the launcher
            read(["gpt", *as_arguments(side)])  # the recipe reads them as if typed
    assert len(TECHNIQUES) == 12
