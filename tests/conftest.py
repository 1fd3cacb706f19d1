"""Set-up for all tests: few threads, a temporary cache, and no tests that need another system."""

import atexit
import compileall
import gc
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import psutil
import pytest

import world_server
from changed_files import changed_since, selected
from suite_costs import Costs, Recorder, longest_first

# Compile each module once. But programs of tests write a module twice within a second, which Python
# would not notice: they, and worlds, read bytecode and write none.
sys.dont_write_bytecode = False
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

# The threads of OpenMP wait in loops, which takes the cores from other tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "ONELOOP_CACHE" not in os.environ:  # an empty cache for this session
    os.environ["ONELOOP_CACHE"] = tempfile.mkdtemp(prefix="oneloop-cache-")
    atexit.register(shutil.rmtree, os.environ["ONELOOP_CACHE"], ignore_errors=True)

HELPERS = Path(__file__).parent / "helpers"
SELECTED = "ONELOOP_TESTS_SELECTED"  # variable: the test files of --changed
WORKER_BYTES = 1_700_000_000  # of memory that a parallel worker and its worlds take at most
SECONDS_OF_SLOW = 900  # after which a slow test counts as one that hangs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-costs",
        action="store_true",
        help="write the seconds and processes of the test files that run to tests/costs.json",
    )
    parser.addoption(
        "--changed",
        nargs="?",
        const="main",
        metavar="BASE",
        help="run the test files of what differs from the commit BASE (main, if it is not given)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The worker processes of pytest-xdist record costs, and their controller adds them up.
    if not config.getoption("numprocesses", None):  # None or 0: this process runs tests
        config.pluginmanager.register(Recorder())
    if hasattr(config, "workerinput"):
        return
    for folder in ("src", "tests"):
        compileall.compile_dir(config.rootpath / folder, quiet=2)
    config.pluginmanager.register(Costs(config))
    world_server.new_folder()
    if config.getoption("numprocesses", None) and sys.platform == "linux":
        interpreter = shlex.join([sys.executable, str(HELPERS / "forked_interpreter.py")])
        config.option.tx = [f"popen//python={interpreter}"] * len(config.option.tx)
    base = config.getoption("--changed")
    if base is not None:
        files = selected(changed_since(base))
        if not files:
            pytest.exit(f"no test file depends on what differs from {base}", returncode=0)
        os.environ[SELECTED] = os.pathsep.join(files)  # the workers inherit it


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the test files that ``--changed`` does not select."""
    if config.getoption("--changed") is None or collection_path.suffix != ".py":
        return None
    file = str(collection_path.relative_to(config.rootpath))
    return file not in os.environ[SELECTED].split(os.pathsep) or None


def pytest_collection_finish() -> None:
    """Leave the imported modules out of later garbage collections, here and in forked processes."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of workers of ``-n auto``: two per core, as far as memory allows.

    Tests wait for processes during a third of their time.
    """
    fitting = psutil.virtual_memory().available // WORKER_BYTES
    return max(1, min(2 * (os.cpu_count() or 1), fitting))


@cache
def needs_linux(file: Path) -> bool:
    """Return whether a test file, or a helper that it imports, uses what only Linux has."""
    text = file.read_text(encoding="utf-8")
    for name in re.findall(r"^\s*(?:from|import) (\w+)", text, re.M):
        helper = HELPERS / f"{name}.py"
        if helper.exists():
            text += helper.read_text(encoding="utf-8")
    return re.search(r"/proc/(self|\{)|os\.sched_|memfd_create", text) is not None


@pytest.fixture(autouse=True)
def sys_path_stays() -> Iterator[None]:
    """Restore sys.path: a command that a test calls adds the folder of its task, and later tests
    would import their tasks from there."""
    before = sys.path.copy()
    yield
    sys.path[:] = before


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as runs of tests do: their number changes the rounding of sums."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if sys.platform != "linux" and needs_linux(item.path):
            item.add_marker(pytest.mark.skip(reason="reads files of Linux's kernel"))
        # A slow test may run beside others, and its time is no claim.
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SECONDS_OF_SLOW))
    longest_first(items)
