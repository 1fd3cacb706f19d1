"""The recorder of benchmarks/files_on_a_way.py notes functions that run, in all processes, and the
script counts the files whose functions run on a way and not in its control."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worlds import ROOT

pytestmark = pytest.mark.covers()

MODULES = {
    "only_imported": "def f():\n    pass\n",
    "at_module_level": "numbers = [n for n in range(3)]\ntotal = sum(n for n in numbers)\n",
    "class_body": "class A:\n    numbers = [number for number in range(3)]\n",
    "function": "def f():\n    pass\n",
    "method": "class A:\n    def f(self):\n        pass\n",
    "in_thread": "def f():\n    pass\n",
    "in_child": "def f():\n    pass\n",
    "in_step": "def f():\n    pass\n",
    "after_steps": "def f():\n    pass\n",
}
PROGRAM = """
import subprocess
import sys
import threading

from accelerate.accelerator import Accelerator
from oneloop import after_steps, at_module_level, class_body, function, in_step, in_thread
from oneloop import method, only_imported

function.f()
method.A().f()
thread = threading.Thread(target=in_thread.f)
thread.start()
thread.join()
subprocess.run([sys.executable, "-c", "from oneloop import in_child; in_child.f()"], check=True)
for step in range(1, 9):
    Accelerator().backward()
    if 4 <= step < 7:
        in_step.f()
    if step >= 7:
        after_steps.f()
"""
IN_STEP = {("in_step", 1)}
EVERYTHING = {
    ("function", 1),
    ("method", 2),
    ("in_thread", 1),
    ("in_child", 1),
    ("in_step", 1),
    ("after_steps", 1),
}
"""files, and the lines of their functions"""


@pytest.mark.parametrize(("steps", "expected"), [("", EVERYTHING), ("4-7", IN_STEP)])
def test_the_recorder_notes_functions_that_run(tmp_path, steps, expected):
    package = tmp_path / "source" / "oneloop"
    accelerate = tmp_path / "source" / "accelerate"
    for folder in (package, accelerate, tmp_path / "start"):
        folder.mkdir(parents=True)
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(text)
    backward = "class Accelerator:\n    def backward(self):\n        pass\n"
    (accelerate / "accelerator.py").write_text(backward)
    recorder = ROOT / "benchmarks" / "function_recorder.py"
    shutil.copy(recorder, tmp_path / "start" / "sitecustomize.py")
    for folder in (package, accelerate):
        (folder / "__init__.py").touch()

    record = tmp_path / "record"
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "start"), str(tmp_path / "source")]),
        "RECORD_SOURCE": f"{package}{os.sep}",
        "RECORD_TO": str(record),
        "RECORD_STEPS": steps,
    }
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
    found = []
    for recorded in record.read_text().splitlines():
        path, line, name = recorded.split("\t")
        assert name.split(".")[-1] == "f"  # with its class from Python 3.11 on
        found.append((Path(path).stem, int(line)))
    assert sorted(found) == sorted(expected)


def test_a_file_counts_if_the_control_does_not_run_one_of_its_functions(tmp_path, monkeypatch):
    # The module under test changes the environment of this process.
    for name in ("PYTHONPATH", "ONELOOP_CACHE", "RECORD_SOURCE", "RECORD_TO", "RECORD_STEPS"):
        monkeypatch.setenv(name, "")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import files_on_a_way

    # Both commands run "both" and one function of "shared"; the control also "only_in_control".
    package = tmp_path / "source" / "oneloop"
    package.mkdir(parents=True)
    two = "def f():\n    pass\n\n\ndef g():\n    pass\n"
    for name in ("__init__", "both", "shared", "only_in_control", "by_chance"):
        (package / f"{name}.py").write_text(two)
    start = "from oneloop import both, by_chance, only_in_control, shared; both.f(); shared.f(); "
    runs = []

    def way(folder):
        # A function of "by_chance" runs in the first of two equal runs.
        runs.append(folder)
        chance = "by_chance.f(); " if len(runs) == 1 else ""
        command = [sys.executable, "-c", f"{start}{chance}shared.g()"]
        subprocess.run(command, cwd=folder, check=True)

    def control(folder):
        command = [sys.executable, "-c", f"{start}only_in_control.f()"]
        subprocess.run(command, cwd=folder, check=True)

    monkeypatch.setattr(files_on_a_way, "WAYS", [files_on_a_way.Way("a way", way, control)])
    found, by_chance = files_on_a_way.measure(tmp_path / "source", ["way"])
    assert found == [{"shared.py": ["g"]}]
    assert by_chance == {"by_chance.py": ["f"]}
    assert len(runs) == 2
