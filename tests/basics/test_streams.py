"""Output never ends training: a full disk, a closed pipe, an encoding without some characters."""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from oneloop.basics.streams import lossy, replace_unknown_characters
from worlds import run, train

pytestmark = pytest.mark.covers("oneloop.basics.streams", "oneloop.train")

TASK = """
import torch
from torch import nn
from torch.utils.data import default_collate
class Sines:
    collate = staticmethod(default_collate)
    calls = 0
    def model(self): return nn.Linear(1, 1)
    def train_set(self):
        return [{"x": x, "y": x.sin()} for x in torch.linspace(-3, 3, 100)[:, None]]
    def eval_sets(self): return {"validation": self.train_set()}
    def weight(self, batch): return torch.tensor(float(len(batch["x"])))
    def loss(self, model, batch): return (model(batch["x"]) - batch["y"]).square().sum(), {}
class Failing(Sines):
    def loss(self, model, batch):
        Failing.calls += 1
        if Failing.calls > 12:
            raise RuntimeError("a real error")
        return super().loss(model, batch)
"""
OPEN: list[Any] = []  # streams that would close their descriptor
KEYS = ["--duration", "12", "--log.every", "1", "--run.dir", "run"]


def logged(folder: Path) -> int:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return sum("train/loss" in json.loads(line) for line in lines)


def train_to(target: str, encoding: str, words: list[str], how: str = "command") -> None:
    """Train with this file, or a pipe that nobody reads, as standard output."""
    if target == "pipe":
        reading, writing = os.pipe()
        os.close(reading)
    else:
        writing = os.open(target, os.O_WRONLY)
    os.dup2(writing, 1)
    OPEN.append(sys.stdout)
    sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding=encoding)  # noqa: SIM115
    if how == "fit":
        sys.path.insert(0, os.getcwd())
        from sines import Sines  # type: ignore[import-not-found]

        from oneloop import fit

        fit(Sines, duration=12, log={"every": 1}, run={"dir": "run"})
        return
    OPEN.extend((sys.stdout, sys.stderr))
    sys.stdout, sys.stderr = lossy(sys.stdout), lossy(sys.stderr)
    train(words)


@pytest.mark.parametrize(
    ("target", "encoding", "how"),
    [
        ("/dev/null", "latin-1", "command"),
        ("/dev/null", "ascii", "fit"),
        # Below, the command as it is typed writes to a full disk.
        pytest.param("/dev/full", "utf-8", "command", marks=pytest.mark.slow),
        ("/dev/full", "utf-8", "fit"),
        ("pipe", "ascii", "command"),
    ],
)
def test_output_ends_nothing(tmp_path, target, encoding, how):
    (tmp_path / "sines.py").write_text(TASK)
    run(train_to, target, encoding, ["sines.py:Sines", *KEYS], how, folder=tmp_path).ok()
    assert logged(tmp_path) == 12 and (tmp_path / "run" / "final").is_dir()


@pytest.mark.parametrize("target", ["/dev/full", "pipe"])
def test_a_real_error_keeps_its_message_and_code(tmp_path, target):
    (tmp_path / "sines.py").write_text(TASK)
    world = run(train_to, target, "ascii", ["sines.py:Failing", *KEYS], folder=tmp_path)
    assert world.codes == [1] and "RuntimeError: a real error" in world.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["exit_code"] == 1


def as_typed(words: list[str]) -> None:
    """Run ``python -m oneloop.train`` with its supervisor, where both streams are a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(full, number)
        OPEN.append(getattr(sys, name))
        stream = open(number, "wb", closefd=False)  # noqa: SIM115
        setattr(sys, name, io.TextIOWrapper(stream, encoding="ascii", line_buffering=True))
    sys.argv = ["train", *words]
    sys.modules.pop("oneloop.train", None)
    runpy.run_module("oneloop.train", run_name="__main__", alter_sys=True)


def test_the_command_on_a_full_disk_in_a_narrow_encoding(tmp_path):
    (tmp_path / "sines.py").write_text(TASK)
    run(as_typed, ["sines.py:Sines", *KEYS], folder=tmp_path).ok()
    assert logged(tmp_path) == 12


def test_what_belongs_to_others_is_untouched(capsys):
    before = sys.stdout, sys.stderr
    replace_unknown_characters()
    assert (lossy(sys.stdout), lossy(sys.stderr)) == (sys.stdout, sys.stderr) == before
    print("seen")
    assert capsys.readouterr().out == "seen\n"
