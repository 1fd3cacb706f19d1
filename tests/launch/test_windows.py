"""Systems without POSIX: one message, before an import fails. Emulated by
tests/helpers/on_windows/sitecustomize.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.__main__",
    "oneloop.basics.system",
    "oneloop.launch.before_imports",
)

WINDOWS = ROOT / "tests" / "helpers" / "on_windows"
(SCRIPT,) = re.findall(r'^oneloop = "(.*):main"$', (ROOT / "pyproject.toml").read_text(), re.M)
PROGRAMS = {
    "oneloop": ["-c", f"import sys; from {SCRIPT} import main; sys.exit(main())", "launch"],
    "python -m oneloop": ["-m", "oneloop", "--help"],
    "python -m oneloop.train": ["-m", "oneloop.train", "digits", "--duration", "1"],
    "python -m oneloop.tools.after_training.evaluate_and_predict": [
        "-m",
        "oneloop.tools.after_training.evaluate_and_predict",
        "evaluate",
        "runs/digits",
    ],
}
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
    *("-m", "oneloop.train", "digits", "--duration", "1"),
]
FIT = """
import oneloop
try:
    oneloop.fit("digits", duration="1")
except ImportError as error:
    print(error)
"""
ALONE = """
import oneloop.ema, oneloop.data.order, oneloop.optim.clip, oneloop.optim.schedule
from oneloop.basics.system import sys
print(oneloop.__version__, sys.platform)
"""


def on_windows(words, folder):
    """Run Python as on Windows, in an empty folder where nothing may be written."""
    folders = os.pathsep.join([str(WINDOWS), str(ROOT / "src")])
    variables = {**os.environ, "PYTHONPATH": folders, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, capture_output=True, text=True
    )
    assert [*folder.iterdir()] == []
    return done


def told(output):
    """Return the one message about Windows in the lines of an output."""
    (line,) = [line for line in output.splitlines() if line.startswith("oneloop: ")]
    assert "needs fork" in line and "wsl --install" in line
    return line


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_windows_a_program_says_what_is_missing(program, tmp_path):
    done = on_windows(PROGRAMS[program], tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"{told(done.stderr)}\n" and done.stdout == ""


@pytest.mark.slow
def test_on_windows_accelerates_launcher_passes_the_message_on(tmp_path):
    done = on_windows(ACCELERATE, tmp_path)
    assert told(done.stderr) and "returned non-zero exit status 2" in done.stderr


def test_on_windows_fit_raises_the_same_message(tmp_path):
    done = on_windows(["-c", FIT], tmp_path)
    assert done.returncode == 0 and "wsl --install" in done.stdout, done.stderr


def test_on_windows_single_modules_work(tmp_path):
    done = on_windows(["-c", ALONE], tmp_path)
    assert done.returncode == 0 and done.stdout.endswith(" win32\n"), done.stderr
