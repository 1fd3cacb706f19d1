"""Select the test files for a change: ``pytest --changed BASE``.

A test file is selected if one of these differs from BASE in the working tree:

- the test file, or a helper that it imports;
- a module that its marker ``covers`` lists, or that such a module imports;
- any other file, such as a recipe or a page, whose name or top folder the test names.

A change of what all tests use selects all.
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from code_measures import imports

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"
HELPERS = TESTS / "helpers"

# A change of these selects all tests.
EVERYWHERE = (
    "src/oneloop/basics/",
    "tests/conftest.py",
    "tests/helpers/warm.py",
    "tests/helpers/worlds.py",
    "pyproject.toml",
)

# They read all sources.
RULES = frozenset({"tests/whole/test_house.py", "tests/whole/test_messages.py"})


def changed_since(base: str) -> list[str]:
    """Return the paths that differ from a commit in the working tree, with new files.

    Args:
        base: the commit; the changes since it left the current branch count.
    """
    fork = _git("merge-base", base, "HEAD")[0]
    differ = _git("diff", "--name-only", fork)
    return [*differ, *_git("ls-files", "--others", "--exclude-standard")]


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split("\n")[:-1]


def selected(changed: list[str]) -> set[str]:
    """Return the test files for changed files, as paths from the root."""
    tests = {str(file.relative_to(ROOT)) for file in TESTS.glob("*/test_*.py")}
    if any(path.startswith(EVERYWHERE) for path in changed):
        return tests
    if any(path.endswith(".py") for path in changed):
        return {test for test in tests if _needs(test, changed)} | RULES
    return {test for test in tests if _needs(test, changed)}


def _needs(test: str, changed: list[str]) -> bool:
    """Return whether a test file may give another result after these changes."""
    own = _with_helpers(ROOT / test)
    modules = set(covered(ROOT / test))
    for module in covered(ROOT / test):
        modules.update(_imported(module))
    text = "".join(_text(file) for file in own)

    for path in changed:
        file = ROOT / path
        if file in own:
            return True
        if path.startswith("src/") and file.suffix == ".py":
            if _module(file) in modules:
                return True
        elif file.parent != HELPERS and not path.startswith("tests/"):
            # Tests find such a file by its name, as a recipe, or by a search of its folder.
            folder = file.relative_to(ROOT).parts[0]
            names = (file.name, f'"{file.stem}"', f'"{folder}"')
            if any(name in text for name in names):
                return True
    return False


@cache
def covered(test: Path) -> frozenset[str]:
    """Return the modules in the marker ``covers`` of a test file."""
    marker = _text(test).partition("pytest.mark.covers(")[2].partition("\n)")[0]
    return frozenset(re.findall(r'"(oneloop[\w.]*)"', marker.partition("\n\n")[0]))


@cache
def _with_helpers(file: Path) -> frozenset[Path]:
    """Return a test file and the helpers that it imports, directly or through others."""
    found = {file}
    waiting = [file]
    while waiting:
        for name in imports(waiting.pop()):
            helper = HELPERS / f"{name.partition('.')[0]}.py"
            if helper.exists() and helper not in found:
                found.add(helper)
                waiting.append(helper)
    return frozenset(found)


@cache
def _imported(module: str) -> tuple[str, ...]:
    """Return the modules that a module of oneloop imports."""
    file = SOURCE / module.replace(".", "/")
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    return tuple(imports(file)) if file.exists() else ()


def _module(file: Path) -> str:
    name = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
