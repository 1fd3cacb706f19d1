"""The recorder of benchmarks/files_on_a_way.py counts functions that run, in all processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from worlds import ROOT

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
EVERYTHING = {"function", "method", "in_thread", "in_child", "in_step", "after_steps"}


@pytest.mark.parametrize(("steps", "expected"), [("", EVERYTHING), ("4-7", {"in_step"})])
def test_the_recorder_counts_functions_that_run(tmp_path, steps, expected):
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
    lines = record.read_text().splitlines()
    assert sorted(Path(line).stem for line in lines) == sorted(expected)
