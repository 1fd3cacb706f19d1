"""oneloop works from a wheel in a new environment and from another folder, without a checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from oneloop.basics.extras import EXTRAS
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers("oneloop.basics.extras")

TEMPLATE = """
oneloop new my_task.py
oneloop launch --config_file single my_task.py:MyTask --duration 400
"""
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
for cell in notebook.cells:
    for output in cell.get("outputs", []):
        print(output.get("text", "") or output.get("data", {}).get("text/plain", ""))
"""


@pytest.fixture(scope="module", params=["borrowed", pytest.param("fresh", marks=pytest.mark.slow)])
def installed(request, tmp_path_factory):
    """Return the programs of an environment with the wheel; its requirements are installed there,
    or borrowed from this environment (without its oneloop)."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = shutil.which("uv") or str(Path(sys.executable).parent / "uv")
    if not Path(uv).exists():
        pytest.skip("needs uv")
    _do([uv, "build", "--quiet", "--wheel", "--out-dir", str(folder / "dist"), str(ROOT)], folder)
    _do([uv, "venv", "--quiet", "--python", sys.executable, str(folder / "env")], folder)
    (wheel,) = (folder / "dist").glob("*.whl")
    python = folder / "env" / "bin" / "python"
    install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    if request.param == "fresh":
        # The same versions as here, so that nothing is downloaded again.
        frozen = _do([uv, "pip", "freeze", "--python", sys.executable], folder).splitlines()
        (folder / "same.txt").write_text("".join(f"{line}\n" for line in frozen if "==" in line))
        _do([*install, "-c", "same.txt", f"{wheel}[recipes,notebook]"], folder)
    else:
        _do([*install, "--no-deps", str(wheel)], folder)
        (own,) = (folder / "env").glob("lib/python*/site-packages")
        (own / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python.parent


def _do(words: list[str], folder: Path, **more: str) -> str:
    variables = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _typed(installed: Path, folder: Path, lines: str) -> None:
    for line in lines.strip().splitlines():
        _do([str(installed / "oneloop"), *line.split()[1:]], folder)


def _ended(folder: Path, run: str) -> dict:
    return json.loads((folder / "runs" / run / "summary.json").read_text())


def test_the_sdist_and_the_wheel_built_from_it_hold_the_package(tmp_path):
    """They hold all files of the package, but no tests, caches or runs."""
    # A clone after some work in it.
    clone = tmp_path / "clone"
    for name in ("src", "accelerate_configs", "docs", "launch"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, clone)
    files = {}  # path in the clone and the sdist: path in the wheel
    for path in clone.rglob("*"):
        name = path.relative_to(clone).as_posix()
        if path.is_file() and name.startswith("src/"):
            files[name] = name.removeprefix("src/")
        elif path.is_file() and name.startswith("accelerate_configs/"):
            files[name] = f"oneloop/{name}"
    for left in ("runs/digits/recipe.yaml", "src/oneloop/runs/digits/recipe.yaml", "tests/test.py"):
        (clone / left).parent.mkdir(parents=True)
        (clone / left).touch()
    (clone / "src" / "oneloop" / "__pycache__").mkdir()
    (clone / "src" / "oneloop" / "__pycache__" / "ema.cpython-311.pyc").touch()

    # The sdist, and the wheel that is built from it.
    _do([sys.executable, "-m", "build", "--no-isolation", str(clone)], tmp_path)
    (sdist,) = (clone / "dist").glob("*.tar.gz")
    (wheel,) = (clone / "dist").glob("*.whl")
    name = sdist.name.removesuffix(".tar.gz")
    with tarfile.open(sdist) as archive:
        sources = {member.removeprefix(f"{name}/") for member in archive.getnames()}
    about = {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert sources == {*files, *about}
    with zipfile.ZipFile(wheel) as archive:
        members = {*archive.namelist()}
        metadata = archive.read(f"{name}.dist-info/METADATA").decode()
    about = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    assert members == {*files.values(), *(f"{name}.dist-info/{file}" for file in about)}
    readme = (ROOT / "README.md").read_text()
    assert readme in metadata and f'pip install "dist/{wheel.name}[recipes]"' in readme
    for file in ("py.typed", "tasks/recipes/digits.yaml", "accelerate_configs/ddp.yaml"):
        assert f"oneloop/{file}" in members


def test_every_module_of_an_extra_is_one_of_pyproject():
    declared = (ROOT / "pyproject.toml").read_text()
    for module, extra in EXTRAS.items():
        package = {"sklearn": "scikit-learn"}.get(module, module)
        assert re.search(rf'^{extra} = \[.*"{package}>=', declared, re.M), module


def _without(module: str, words: list[str]) -> None:
    sys.modules[module] = None
    train(words)


LACKING = {
    "gpt": ("transformers", "None in sys.modules; oneloop's extra"),  # when its model is built
    "sft": ("tokenizers", "None in sys.modules; oneloop's extra"),  # when the task is made
}


@pytest.mark.parametrize("recipe", LACKING)
def test_a_recipe_without_its_packages_names_the_extra(tmp_path, recipe):
    module, expected = LACKING[recipe]
    world = run(_without, module, [recipe], folder=tmp_path)
    assert world.codes == [2] and world.output.count("oneloop: ") == 1, world.output
    extra = EXTRAS[module]
    assert f"{expected} {extra!r} has it: pip install 'oneloop[{extra}]'\n" in world.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_template_and_the_notebook_run_without_a_checkout(installed, tmp_path):
    _typed(installed, tmp_path, TEMPLATE)
    where = _do(
        [str(installed / "python"), "-c", "import oneloop; print(oneloop.__file__)"], tmp_path
    )
    assert where.startswith(str(installed.parent)) and str(ROOT) not in where
    assert _ended(tmp_path, "my_task")["eval/accuracy"] > 0.9
    assert (tmp_path / "runs" / "my_task" / "report.html").exists()

    shutil.copy(ROOT / "docs" / "notebook.ipynb", tmp_path)
    words = [str(installed / "python"), "-c", EXECUTE, "notebook.ipynb"]
    output = _do(words, tmp_path, PATH=f"{installed}:{os.environ['PATH']}")
    assert "batch.size must be at least 1" in output  # errors are reported
    assert (
        _ended(tmp_path, "rings")["eval/accuracy"] > 0.9
        and _ended(tmp_path, "half")["exit_code"] == 0
    )
    assert _ended(tmp_path, "two")["eval/loss"] < 0.1
    assert json.loads((tmp_path / "runs/two/environment.json").read_text())["processes"] == 2


@pytest.mark.slow
def test_the_readmes_task_runs_without_a_checkout(installed, tmp_path):
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "sines.py").write_text(
        re.search(r"```python\n# sines.py\n(.*?)```", readme, re.S)[1]
    )
    commands = re.findall(r"^oneloop launch .* sines\.py:Sines --duration .*$", readme, re.M)
    _typed(installed, tmp_path, "\n".join(commands))
    for name in ("sines", "sines-on-two"):
        assert _ended(tmp_path, name)["eval/loss"] < 0.01
    _typed(installed, tmp_path, "oneloop verify runs/sines\noneloop export runs/sines --to out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_lowest_versions_train_all_recipes(tmp_path):
    output = _do(["bash", str(ROOT / "launch" / "lowest.sh"), str(tmp_path / "env")], tmp_path)
    assert output.splitlines()[-1] == "the lowest versions train all recipes"
    assert len(re.findall(r"^\w+ under \w+: done; results in ", output, re.M)) == 12
