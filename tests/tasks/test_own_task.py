"""A task in one file in any folder: the template, the forms of its name, its state, and finding it
after the run."""

from __future__ import annotations

import csv
import json
import os
import sys

import pytest
from safetensors.torch import load_file

from oneloop import cli
from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.parse import read
from slow_cases import with_slow
from worlds import apply, run, train

pytestmark = pytest.mark.covers(
    "oneloop.cli",
    "oneloop.launch.command",
    "oneloop.launch.signals",
    "oneloop.optim.bad_step_guard",
    "oneloop.recipe.class_paths",
    "oneloop.tasks.template",
)

SPLITS = with_slow([("single", 1), ("ddp", 2), ("fsdp2", 2)], [("ddp", 2), ("fsdp2", 2)])
SHORT = ["--duration", "60", "--track", "none", "--eval.every", "0"]


@pytest.fixture
def written(tmp_path):
    """Write the template to a separate folder."""
    assert cli.main(["new", str(tmp_path / "code" / "spirals.py")]) == 0
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "code" / "spirals.py"


@pytest.mark.parametrize(("config", "ranks"), SPLITS)
def test_the_template_trains_and_is_found_again_from_another_folder(written, config, ranks):
    folder, elsewhere = written.parent, written.parents[1] / "elsewhere"
    words = [*SHORT, "--task.width", "32", "--optimizer.lr", "3e-3"]
    run(train, ["spirals.py:MyTask", *words], ranks=ranks, config=config, folder=folder).ok()
    there = folder / "runs" / "spirals"  # named after the file
    ended = json.loads((there / "summary.json").read_text())
    assert ended["step"] == 60 and ended["eval/accuracy"] > 0.6 and "test/accuracy" in ended
    assert "width: 32" in (there / "recipe.yaml").read_text()

    (elsewhere / "points.csv").write_text("0.1,0.2\n-0.3,0.5\n0.7,-0.1\n")
    # the user must confirm whose code that is
    rejected = run(apply, ["evaluate", str(there)], folder=elsewhere)
    assert rejected.codes == [2] and f"--task {written}:MyTask" in rejected.output, rejected.output
    own = ["--task", f"{written}:MyTask"]
    evaluated = run(
        apply,
        ["evaluate", str(there), "--json", *own],
        ranks=ranks,
        config=config,
        folder=elsewhere,
    )
    evaluated.ok()
    metrics = json.loads(
        next(line for line in evaluated.output.splitlines() if line.startswith("{"))
    )
    assert metrics["eval/loss"] == pytest.approx(ended["eval/loss"], rel=1e-5)
    assert f"is imported from {written}" in evaluated.output
    words = ["predict", str(there), "--data", "points.csv", "--to", "said.csv", *own]
    run(apply, words, ranks=ranks, config=config, folder=elsewhere).ok()
    rows = list(csv.DictReader((elsewhere / "said.csv").open()))
    assert [row["row"] for row in rows] == ["0", "1", "2"] and all(
        0.5 <= float(row["confidence"]) <= 1 for row in rows
    )
    assert run(cli.main, ["export", str(there), "--to", "out", *own], folder=elsewhere).ok() == [0]
    out = load_file(elsewhere / "out" / "model.safetensors")
    assert out.keys() == load_file(there / "final" / "model.safetensors").keys()
    assert (
        cli.main(["report", str(there)]) == 0 and "spirals" in (there / "report.html").read_text()
    )


def test_one_task_has_several_names(written):
    """From another folder and by its module name it is the same task: its finished run is
    recognised."""
    folder = written.parent
    words = ["--duration", "3", "--track", "none", "--run.dir", str(folder / "run")]
    run(train, ["spirals.py:MyTask", *words], folder=folder).ok()
    names = [["--task", "spirals.MyTask"], [f"{written}:MyTask"], ["--task", "./spirals.py:MyTask"]]
    for name, where in zip(names, (folder, written.parents[1], folder), strict=True):
        again = run(_from_here, [*name, *words], folder=where)
        again.ok()
        assert "finished at step 3" in again.output, again.output
    other = folder / "other.py"
    other.write_text(written.read_text())
    rejected = run(train, ["other.py:MyTask", *words], folder=folder)
    assert rejected.codes == [2] and "task.name: spirals.MyTask -> other.MyTask" in rejected.output


def _from_here(words):
    sys.path.insert(0, "")
    train(words)


def test_where_its_file_has_gone(written, capsys):
    folder = written.parent
    run(train, ["spirals.py:MyTask", "--duration", "2", "--track", "none"], folder=folder).ok()
    moved = folder.parent / "moved.py"
    written.rename(moved)
    gone = run(apply, ["evaluate", str(folder / "runs" / "spirals")], folder=folder.parent)
    assert gone.codes == [2] and "does not exist" in gone.output
    words = ["evaluate", str(folder / "runs" / "spirals"), "--task", f"{moved}:MyTask"]
    run(apply, words, folder=folder.parent).ok()


NAMED = {
    "missing.py:MyTask": "missing.py does not exist",
    "spirals.py": "write the file and the name in it: spirals.py:Name",
    "spirals.py:": "write the file and the name in it: spirals.py:Name",
    "spirals.py:MyTusk": "'spirals.py' has no 'MyTusk'; it has Spirals, MyTask",
    "spirals.py:Spirals": "is a class that lacks model",
    "spirals.txt:MyTask": "write the file and the name in it",
    "json.py:MyTask": "is that of a module of Python itself; give it another name",
    "yaml.py:MyTask": "give yaml.py another name",
    "broken.py:MyTask": "importing 'broken.py' failed: SyntaxError",
    "raises.py:MyTask": "importing 'raises.py' failed: ZeroDivisionError",
    "needs.py:MyTask": "needs the module 'not_here', which is not installed",
    "unnamed.py:MyTask": "needs the module 'install foo first', which is not installed",
    "a.b.py:MyTask": "a.b.py cannot be imported: its name holds a second dot",
}


def _forgetting(monkeypatch):
    """Forget modules that the test imports."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "spirals", raising=False)


@pytest.mark.parametrize("name", NAMED)
def test_names_that_lead_nowhere(written, monkeypatch, name):
    monkeypatch.chdir(written.parent)
    for file in ("json.py", "yaml.py", "a.b.py"):
        (written.parent / file).write_text("class MyTask: pass\n")
    (written.parent / "broken.py").write_text("def (\n")
    (written.parent / "raises.py").write_text("1 / 0\n")
    (written.parent / "needs.py").write_text("import not_here\n")
    unnamed = "raise ModuleNotFoundError('install foo first')\n"
    (written.parent / "unnamed.py").write_text(unnamed)
    _forgetting(monkeypatch)
    with pytest.raises(BadInput) as rejected:
        resolve("task", name)
    assert NAMED[name] in str(rejected.value)


def test_two_tasks_or_none(written, monkeypatch):
    monkeypatch.chdir(written.parent)
    _forgetting(monkeypatch)
    with pytest.raises(BadInput, match="two tasks given"):
        read(["spirals.py:MyTask", "--task", "other.py:MyTask"])
    with pytest.raises(BadInput, match="or a task"):
        read(["--seed", "3"])
    assert read(["spirals.py:MyTask", "--task.width", "8"]).task.options["width"] == 8


def test_a_file_that_was_changed_is_read_again(written, monkeypatch):
    _forgetting(monkeypatch)
    first = resolve("task", f"{written}:MyTask")
    assert resolve("task", f"{written}:MyTask") is first
    written.write_text(written.read_text().replace("width: int = 64", "width: int = 128"))
    assert resolve("task", f"{written}:MyTask")().width == 128


def test_arguments_and_docstrings_are_on_the_command_line(written):
    helped = run(_helped, str(written), folder=written.parent)
    assert helped.codes == [0] and "distance from the spiral" in helped.output
    assert "--task.noise" in helped.output and "--batch.size" in helped.output


def _helped(file):
    read([f"{file}:MyTask", "--help"])


NEW = {
    (): "takes the file to write",
    ("a.py", "b.py"): "unrecognized arguments",
    ("--force",): "unrecognized arguments",
    ("here.txt",): "cannot be a module of yours",
    ("json.py",): "cannot be a module of yours",
    ("my-task.py",): "cannot be a module of yours",
    ("torch.py",): "cannot be a module of yours",
    ("spirals.py",): "spirals.py already exists",
    ("spirals.py/x.py",): "cannot be written",
}


@pytest.mark.parametrize("words", NEW)
def test_what_new_rejects(written, monkeypatch, capsys, words):
    monkeypatch.chdir(written.parent)
    before = written.read_text()
    assert cli.main(["new", *words]) == 2
    assert NEW[words] in capsys.readouterr().err
    assert os.listdir() == ["spirals.py"] and written.read_text() == before


def test_the_config_files_are_written_out(tmp_path, monkeypatch, capsys):
    from oneloop.launch.config_files import config_file, config_files

    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "--configs"]) == 0 and cli.main(["new", "--configs", "mine"]) == 0
    for name, path in config_files().items():
        assert (tmp_path / "mine" / path.name).read_text() == path.read_text()
        assert config_file(name) == str(path)
    assert {"single", "ddp", "fsdp2"} <= set(config_files())
    (tmp_path / "ddp").write_text("")  # the user's file has priority
    assert config_file("ddp") == "ddp" and config_file("unknown") == "unknown"
    assert cli.main(["new", "--configs"]) == 2 and "already exists" in capsys.readouterr().err
    assert cli.main(["launch", "--config_file", "dpd", "digits"]) == 2
    assert "known: ddp, fsdp2" in capsys.readouterr().err


STATE = """
import spirals
from torch import nn


class Counting(spirals.MyTask):
    \"\"\"Its noise shrinks with the batches that were trained, which it counts.\"\"\"

    additive = False  # what counts while it trains is not the same for any split
    count = 0

    def loss(self, model, batch):
        if model.training:
            batch = {**batch, "point": batch["point"] * (1 + 0.1 / (1 + self.count))}
            self.count += 1
        return super().loss(model, batch)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
"""


@pytest.mark.parametrize(("config", "ranks"), SPLITS)
def test_a_tasks_own_state_is_saved_and_resumed(written, config, ranks):
    folder = written.parent
    (folder / "counting.py").write_text(STATE)
    words = ["counting.py:Counting", "--duration", "20", "--save.every", "5", "--save.keep", "9"]
    words += ["--track", "none", "--batch.size", "16"]
    how = {"ranks": ranks, "config": config, "folder": folder}
    run(train, [*words, "--run.dir", "whole"], **how).ok()
    stopped = run(_stopped_at_7, [*words, "--run.dir", "parts"], **how)
    assert set(stopped.codes) == {75}
    run(train, [*words, "--run.dir", "parts"], **how).ok()
    assert json.loads((folder / "whole/final/task.json").read_text()) == {"count": 20}
    for name in ("model.safetensors", "task.json"):
        assert (folder / "whole/final" / name).read_bytes() == (
            folder / "parts/final" / name
        ).read_bytes()
    assert run(
        cli.main, ["export", "parts", "--to", "out", "--checkpoint", "10"], folder=folder
    ).ok() == [0]
    assert json.loads((folder / "out" / "task.json").read_text()) == {"count": 10}


def _stopped_at_7(words):
    """Train, and request a stop at step 7."""
    from oneloop.launch.signals import Stopping
    from oneloop.optim.bad_step_guard import Guard

    taken, step = [], Guard.step

    def counted(self, *args, **options):
        taken.append(1)
        return step(self, *args, **options)

    Guard.step = counted
    Stopping.requested = lambda self: (
        self.by is not None or (len(taken) >= 7 and setattr(self, "by", "a test") is None)
    )
    train(words)
