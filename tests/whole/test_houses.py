"""The three houses: a run needs neither tools nor packaged tasks."""

import ast
import json
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from changed_files import covered
from code_measures import imports
from core_copies import PACKAGE, copied, line_command, variables
from oneloop.basics.houses import TASKS, TOOLS, missing
from oneloop.cli import COMMANDS, command
from worlds import CONFIGS, ROOT, run

pytestmark = pytest.mark.covers(
    "oneloop.basics.houses",
    "oneloop.cli",
    "oneloop.tools.graph",
)


def _train_with_the_copy(words: list[str]) -> None:
    """Do what python -m oneloop.train does with the copy of oneloop in this folder.

    This process has imported the libraries, which takes seconds, and forgets oneloop.
    """
    here = Path.cwd()
    for name in [name for name in sys.modules if name.partition(".")[0] == "oneloop"]:
        del sys.modules[name]
    sys.path[:] = [str(here), *(one for one in sys.path if Path(one) != PACKAGE.parent)]

    import oneloop

    assert Path(oneloop.__file__).is_relative_to(here)
    sys.argv = ["oneloop.train", *words]
    try:
        runpy.run_module("oneloop.train", run_name="__main__", alter_sys=True)
    finally:
        loaded = [name for name in sys.modules if name.startswith("oneloop.")]
        own = [sys.modules[name].__file__ or "" for name in loaded]
        assert len(own) > 50 and all(Path(file).is_relative_to(here) for file in own), own


def test_a_run_needs_neither_tools_nor_packaged_tasks(tmp_path):
    copied(tmp_path, "tools", "tasks")
    _, *words = line_command("single", ["--duration", "6", "--track", "[tensorboard]"])
    assert words[:2] == ["-m", "oneloop.train"]
    world = run(_train_with_the_copy, words[2:], folder=tmp_path, variables=variables(tmp_path))
    world.ok()
    assert "TensorBoard gets no graph of the model: oneloop.tools.graph is not" in world.output
    assert "report.html is not written: oneloop.tools.report.page is not" in world.output
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
    whole = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert whole["step"] == 6
    assert whole["best"]["value"] is not None

    # What the core cannot do without them is rejected before anything is written.
    words = [*words[2:], "--run.dir", "searched", "--batch.micro", "auto"]
    world = run(_train_with_the_copy, words, folder=tmp_path, variables=variables(tmp_path))
    assert world.codes == [2]
    assert (
        "oneloop cannot run batch.micro auto, because oneloop.tools.plan.micro_batch is not in this"
        in world.output
    )
    assert not (tmp_path / "searched").exists()


def test_the_table_names_what_is_there():
    for name, kind in TASKS.items():
        assert hasattr(import_module(f"oneloop.tasks.{name}"), kind)
    for name, parts in TOOLS.items():
        assert missing(name) == ""
        for part in parts:
            import_module(f"oneloop.{part}")
    assert all(command(name).__doc__ for name in COMMANDS)


def reached(module: str, found: set[str]) -> None:
    """Add to ``found`` a module of tools/ or tasks/, and those that it imports, and so on.

    Args:
        module: a dotted name below oneloop.
        found: of the modules so far.
    """
    file = PACKAGE.joinpath(*module.split(".")).with_suffix(".py")
    if module in found or not file.is_file():
        return
    found.add(module)
    if module.startswith("tasks."):
        return
    for name in imports(file):
        below = name.removeprefix("oneloop.")
        if below.startswith(("tools.", "tasks.")):
            reached(below, found)
            reached(below.rpartition(".")[0], found)


@pytest.mark.parametrize("name", TOOLS)
def test_the_table_says_what_a_tool_needs(name):
    first, *needs = TOOLS[name]
    found = set[str]()
    reached(first, found)
    parts = {"tasks" if one.startswith("tasks") else ".".join(one.split(".")[:2]) for one in found}
    own = "tasks" if first.startswith("tasks") else ".".join(first.split(".")[:2])
    assert parts - {own} == {*needs}


def test_a_command_without_its_tool_is_rejected(tmp_path):
    copied(tmp_path, "worth", "run_reader.py", "elastic", "tasks")
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}

    def typed(*words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "oneloop", *words]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    # The overview lists what is there, and names what is not.
    listed = typed("--help")
    assert listed.returncode == 0, listed.stderr
    assert "worth     oneloop.tools.worth.command is not in this copy" in listed.stdout
    assert "plan      Report what a run needs" in listed.stdout

    (tmp_path / "a.yaml").write_text("task: {name: sft}\n")

    # Each message names what was typed or called, and what is missing.
    for words, absent in [
        (["worth", "digits"], "worth.command"),
        (["report", "runs"], "run_reader"),
        (["launch", "--max_restarts", "1", "--config_file", "ddp", "a.yaml"], "elastic.elastic"),
    ]:
        done = typed(*words)
        assert done.returncode == 2
        assert f"oneloop.tools.{absent} is not in this copy of oneloop; install" in done.stderr

    # Without the packaged tasks, their recipes are unknown. A launch without a config file would
    # start the launcher of accelerate, which takes seconds.
    config = ["--config_file", str(CONFIGS / "single.yaml")]
    for words, reason in [
        (["launch", "digits"], "'digits' is unknown, because oneloop.tasks is not in this copy"),
        (
            ["launch", *config, "a.yaml"],
            "cannot run a packaged task, because oneloop.tasks is not in this",
        ),
    ]:
        done = typed(*words)
        assert done.returncode == 2
        assert reason in done.stderr


def test_the_map_of_files_is_that_of_the_docstrings():
    code = "import map_of_files; assert map_of_files.page() == map_of_files.PAGE.read_text()"
    environment = {"PYTHONPATH": str(ROOT / "docs")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# --- the test files of each module
# --------------------------------------------------------------------------------------------------


def modules() -> set[str]:
    """Return the modules of oneloop, without packages that have only a docstring."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        _, *code = ast.parse(file.read_text()).body
        if code or file.name != "__init__.py":
            found.add(name.removesuffix(".__init__"))
    return found


def test_each_module_has_a_test_file_that_covers_it():
    stated = set()
    for file in (ROOT / "tests").glob("*/test_*.py"):
        assert "pytest.mark.covers(" in file.read_text(), f"{file} must state its modules"
        stated |= covered(file)
    assert sorted(modules() - stated) == []
    assert sorted(stated - modules()) == []
