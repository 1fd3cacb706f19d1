"""``oneloop compare``: differing keys, metrics, curves, and whether runs are bit-identical."""

from __future__ import annotations

import sys

import pytest

from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tools.compare.command",
    "oneloop.tools.compare.compare_runs",
    "oneloop.tools.compare.first_difference",
)

WORDS = [
    "digits",
    "--task.width",
    "8",
    "--duration",
    "12",
    "--batch.size",
    "16",
    "--log.every",
    "4",
    "--eval.every",
    "6",
    "--track",
    "none",
    "--save.every",
    "0",
]


def command(words: list[str]) -> None:
    from oneloop.cli import main

    sys.exit(main(["compare", *words]))


def test_runs_are_compared(tmp_path):
    grain = ["--batch.grain", "8", "--run.dir"]
    run(train, [*WORDS, *grain, "one"], folder=tmp_path).ok()
    run(train, [*WORDS, *grain, "two"], folder=tmp_path).ok()
    run(train, [*WORDS, *grain, "other", "--optimizer.lr", "1e-3"], folder=tmp_path).ok()
    run(train, [*WORDS, "--run.dir", "plain"], folder=tmp_path).ok()
    same = run(command, ["one", "two"], folder=tmp_path)
    assert same.codes == [0] and "the recipes are equal" in same.output, same.output
    assert "one and two: bit-identical at 3 log lines, step 4 to 12" in " ".join(
        same.output.split()
    )
    shown = run(command, ["one", "other", "plain"], folder=tmp_path).output
    lines = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines()]
    assert ["optimizer.lr", "0.003", "0.001", "0.003"] in lines and [
        "step",
        "12",
        "12",
        "12",
    ] in lines
    assert ["batch.grain", "8", "8", "None"] in lines
    assert any(cells[0] == "best eval/loss" and cells[1].endswith("at step 12") for cells in lines)
    text = " ".join(shown.split())
    assert (
        "one and other: they differ from step 4 on" in text
        and "different settings: optimizer.lr" in text
    )
    assert "one and plain: not compared bit by bit: plain has no hashes" in text
    assert (
        "train/loss: ━ one ━ other ━ plain" in text and "eval/loss: ━ one ━ other ━ plain" in text
    )
    assert run(command, ["one"], folder=tmp_path).codes == [2]
    nothing = run(command, ["one", "nothing"], folder=tmp_path)
    assert nothing.codes == [2] and "nothing holds no run" in nothing.output
