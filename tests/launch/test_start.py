"""A start imports only what it needs, when it needs it. (benchmarks/start_cost.py measures the
seconds.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.cli",
    "oneloop.launch.before_imports",
    "oneloop.launch.processes",
    "oneloop.show.tracking",
    "oneloop.train",
)

SLOW = (
    "torchmetrics",
    "torchvision",
    "transformers",
    "sklearn",
    "scipy",
    "pandas",
    "plotly",
    "datasets",
)


def loaded(code: str, names: tuple[str, ...], folder) -> list[str]:
    """Return those of these modules that a process has imported at its end."""
    report = (
        f"import atexit, sys; atexit.register(lambda: print('LOADED', [n for n in {names} if n in "
        "sys.modules]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", report + code],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=120,
        check=False,
    )
    line = next(line for line in ended.stdout.splitlines() if line.startswith("LOADED"))
    return eval(line.removeprefix("LOADED"))


def main(*words: str) -> str:
    return (
        f"import runpy; sys.argv = ['x', *{words!r}]; runpy.run_module('oneloop.train', "
        "run_name='__main__')"
    )


def test_the_loader_is_imported_when_it_is_used(tmp_path):
    assert loaded("import oneloop", ("torch", "accelerate"), tmp_path) == []
    used = loaded("from oneloop import Loader", ("torch", *SLOW), tmp_path)
    assert used == ["torch"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("digits", "--help"), marks=pytest.mark.slow),
        pytest.param(("digits", "--batch.siez", "3"), marks=pytest.mark.slow),
        ("nowhere.yaml",),
    ],
)
def test_help_and_bad_input_import_neither_accelerate_nor_the_loop(tmp_path, words):
    names = (
        "accelerate",
        "torch.distributed.tensor",
        "oneloop.launch.processes",
        "oneloop.show.tracking",
        *SLOW,
    )
    assert loaded(main(*words), names, tmp_path) == []


def test_the_package_itself_imports_nothing(tmp_path):
    assert loaded("import oneloop, oneloop.cli", ("torch", "accelerate", "numpy"), tmp_path) == []


def _modules_of_the_loop() -> list[str]:
    """Import the loop, and return the modules of oneloop that are loaded then, without packages.

    This process has imported the libraries, which takes seconds, and forgets oneloop.
    """
    for name in [name for name in sys.modules if name.partition(".")[0] == "oneloop"]:
        del sys.modules[name]
    import oneloop.train

    assert oneloop.train.train
    ours = [name for name in sys.modules if name.startswith("oneloop.")]
    return sorted(name for name in ours if not hasattr(sys.modules[name], "__path__"))


def test_the_loop_loads_only_modules_that_an_ordinary_run_uses():
    (loaded_modules,) = run(_modules_of_the_loop).ok()
    assert len(loaded_modules) <= 160, loaded_modules


@pytest.mark.slow
def test_a_run_of_digits_imports_no_library_that_it_does_not_use(tmp_path):
    words = ("digits", "--debug.dry_run", "true", "--track", "none", "--run.dir", "run")
    # plotly draws the report after the last step
    assert set(loaded(main(*words), SLOW, tmp_path)) <= {"plotly"}
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
    assert "plotly" not in loaded("import oneloop.train", SLOW, tmp_path)
