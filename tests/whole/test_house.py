"""Structure of the package: allowed imports between rooms (top-level packages and modules), and
size limits."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import subprocess
from collections import Counter, defaultdict
from pathlib import Path

import pytest

import code_measures
from code_measures import code_lines, dense, imports, is_pair, measures, statements, tokens
from worlds import ROOT

pytestmark = pytest.mark.covers()

PACKAGE = ROOT / "src" / "oneloop"
LEAVES = (
    "ema",
    "recipe",
    "data",
    "optim",
    "machine",
    "checkpoint",
    "measure",
    "show",
    "supervise",
    "task_protocol",
)
"""rooms that may import only ``basics``"""
BUILT = {"basics", "evaluation", "launch", *LEAVES}
"""what may be imported above the leaves"""
TASKS = {"tasks", "task_protocol", "basics", "data"}
ALLOWED = {
    "basics": set(),
    **{leaf: {"basics"} for leaf in LEAVES},
    "tasks": {"basics", "data", "task_protocol"},
    "evaluation": {"basics", "data", "ema", "show", "task_protocol"},
    "launch": {"basics", *LEAVES},
    "job": BUILT,
    "checks": {"job", *BUILT},
    "run": {"job", *BUILT},
    "loop": {"checks", "job", "run", *BUILT},
    "train": {"checks", "job", "loop", "run", *BUILT},
    "tools": {"checks", "job", "loop", "run", "tasks", "train", *BUILT},
    "api": {"basics", "launch", "recipe", "run", "train"},
    "__main__": {"basics", "cli"},
    "cli": {"basics", "launch"},
}
AT_THE_TOP_OF_TASKS = {"torch", "numpy", "oneloop"}
"""what a task may import at module level, besides the standard library"""


def files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def room_of(module: str) -> str:
    """Return the room of a module: ``oneloop.data.order`` -> ``data``; ``oneloop`` itself has
    none."""
    return [*module.split("."), ""][1]


def wrong_ways(package: Path) -> list[str]:
    """Return the imports that ALLOWED forbids, as ``room/file.py imports oneloop.other.thing``."""
    wrong = []
    for file in files(package):
        path = file.relative_to(package)
        room = path.parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        assert room in ALLOWED, f"{path}: say in this test what the room {room} may import"
        for module in imports(file):
            if module.split(".")[0] == "oneloop" and room_of(module) not in {
                room,
                "",
                *ALLOWED[room],
            }:
                wrong.append(f"{path} imports {module}")
    return wrong


def test_imports_go_one_way():
    assert wrong_ways(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            "optim/clip.py",
            "from oneloop.checkpoint.store import Keep",
        ),  # a leaf imports another leaf
        (
            "machine/torch_settings.py",
            "from oneloop.recipe.schema import Recipe",
        ),  # a leaf imports the recipe
        ("basics/files.py", "from oneloop import ema"),  # basics imports any other room
        ("loop/counters.py", "import oneloop.train"),  # a lower room imports the loop
        (
            "ema.py",
            "def late():\n    from oneloop.tools.run_reader import Record",
        ),  # inside a function, too
        ("cli.py", "from oneloop.tools.run_reader import Record"),  # the core imports a tool
        ("api.py", "from oneloop.tasks.sft import SFT"),  # or a task
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line):
    shutil.copytree(PACKAGE, tmp_path / "oneloop")
    broken = tmp_path / "oneloop" / file
    broken.write_text(f"{broken.read_text()}\n{line}\n")
    assert len(wrong_ways(tmp_path / "oneloop")) == 1


def imported_files(file: Path, package: Path) -> set[Path]:
    """Return the files of a package that one of them imports.

    Imports within functions count, and those for type checkers, too: all of them say that a reader
    of one file needs the other.
    """
    imported = set()
    for name in imports(file):
        if name.split(".")[0] != package.name:
            continue
        # ``from oneloop.data.order import Order`` imports a name of a module.
        place = package.parent.joinpath(*name.split("."))
        if not (place.is_dir() or place.with_suffix(".py").is_file()):
            place = place.parent
        imported.add(place / "__init__.py" if place.is_dir() else place.with_suffix(".py"))
    return imported - {file}


def circles(package: Path) -> list[set[str]]:
    """Return the groups of files of which each imports all others, directly or by others."""
    direct = {file: imported_files(file, package) for file in files(package)}
    reached = {}
    for file in direct:
        reached[file] = set[Path]()
        left = [file]
        while left:
            new = direct[left.pop()] - reached[file]
            reached[file] |= new
            left += new
    groups = []
    for file in direct:
        group = {str(other.relative_to(package)) for other in direct if file in reached[other]}
        group &= {str(other.relative_to(package)) for other in reached[file]}
        if group and group not in groups:
            groups.append(group)
    return groups


def test_no_files_import_one_another():
    assert circles(PACKAGE) == []


@pytest.mark.parametrize(
    "line",
    [
        "from oneloop.data.positions import taken",
        "def late():\n    from oneloop.data import positions",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import oneloop.data.positions",
    ],
)
def test_a_circle_is_found(tmp_path, line):
    (tmp_path / "oneloop" / "data").mkdir(parents=True)
    sources = {
        "order": line,
        "positions": "from oneloop.data.batches import Batch",
        "batches": "from oneloop.data.order import Order",
        "reader": "from oneloop.data.order import Order",
    }
    for name, source in sources.items():
        (tmp_path / "oneloop" / "data" / f"{name}.py").write_text(source)
    assert circles(tmp_path / "oneloop") == [
        {"data/order.py", "data/positions.py", "data/batches.py"}
    ]


def crowded(package: Path) -> list[str]:
    """Return the files that import from too many modules of oneloop, also within functions."""
    found = []
    for file in files(package):
        modules = set()
        for name in imports(file):
            if name.split(".")[0] != "oneloop":
                continue
            # ``from oneloop.basics import exit_codes`` imports a module, not a name of one.
            place = package.parent.joinpath(*name.split("."))
            if not (place.is_dir() or place.with_suffix(".py").is_file()):
                name = name.rpartition(".")[0]
            modules.add(name)
        path = str(file.relative_to(package))
        most = 20 if path == "train.py" else 15
        if len(modules) > most:
            found.append(f"{path} imports from {len(modules)} modules")
    return found


def test_what_is_large_is_listed(capsys):
    """Print advice: a limit would move code from place to place, and not remove it."""
    lines = crowded(PACKAGE)
    known = classes()
    for file in files(PACKAGE):
        path = file.relative_to(PACKAGE)
        source = file.read_text()
        length_of_file = len(source.splitlines())
        if length_of_file > 400:
            lines.append(f"{path} has {length_of_file} lines")
        for node in statements(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines += [f"{path}: {node.name} {excess}" for excess in excesses(node)]
    for name, kind in known.items():
        attributes = len(fields(kind, known))
        if attributes > 12:
            lines.append(f"{name} sets {attributes} attributes")
    with capsys.disabled():
        print("", *sorted(lines), sep="\n")


def excesses(function: ast.FunctionDef) -> list[str]:
    """Return how many lines or parameters a function has, if they are many."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    count = sum(parameter.arg not in ("self", "cls", "ctx") for parameter in parameters)
    sentences = []
    if count > 10:
        sentences.append(f"takes {count} parameters")
    if length(function) > 80:
        sentences.append(f"has {length(function)} lines")
    return sentences


def test_tasks_import_their_libraries_when_they_use_them():
    import sys

    for file in files(PACKAGE / "tasks"):
        if "rows" in file.parts:
            continue
        named = {module.split(".")[0] for module in imports(file, within_functions=False)}
        assert named - set(sys.stdlib_module_names) <= AT_THE_TOP_OF_TASKS, file


def test_every_room_states_what_is_in_it():
    for room in {file.parent for file in files(PACKAGE)}:
        assert ast.get_docstring(ast.parse((room / "__init__.py").read_text())), room
    assert len(list(PACKAGE.glob("*.py"))) <= 10


def test_no_two_public_classes_have_one_name():
    where = defaultdict(list)
    for file in files(PACKAGE):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(file.relative_to(PACKAGE)))
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_inheritance_is_at_most_four_deep():
    bases: dict[str, list[str]] = {}
    for file in files(PACKAGE):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = [ast.unparse(base).partition("[")[0] for base in node.bases]
                bases[node.name] = [name.rpartition(".")[2] for name in names]

    def depth(name: str) -> int:
        ours = [base for base in bases[name] if base in bases and base != name]
        return 1 + max(map(depth, ours), default=0)

    assert not {name: depth(name) for name in bases if depth(name) > MOST_DEEP}


def length(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def test_no_code_is_hidden_from_the_formatter():
    for file in files(PACKAGE):
        source = file.read_text()
        assert "fmt: skip" not in source and "fmt: off" not in source, file


TOKENS = {"core": 100_100, "tasks": 80_700, "tools": 41_200, "src": 222_000}
"""tokens of code that each house, and all of them together, may have; they fall with time"""
PAIRS = 100  # assignments ``a, b = x, y`` in src/, apart from swaps
MOST_DEEP = 4  # classes of oneloop in a line of inheritance
TOKENS_PER_LINE = 9.0  # of code in src/, with brackets and commas
TOKENS_PER_LINE_OF_A_FILE = 11.0
COMMENTS = 0.02  # share of lines that are a comment


def house_of(file: Path) -> str:
    """Return the house of a file: tasks, tools, or the core, which is all the rest."""
    room = file.relative_to(PACKAGE).parts[0]
    return room if room in ("tasks", "tools") else "core"


def test_each_house_stays_below_its_ceiling(capsys):
    of = Counter(src=0)
    for file in files(PACKAGE):
        count = sum(tokens(file.read_text()).values())
        of[house_of(file)] += count
        of["src"] += count
    with capsys.disabled():
        listed = [f"{name} {of[name]:,} of {most:,}" for name, most in TOKENS.items()]
        print(f"\ntokens of code: {', '.join(listed)}")
        print(sizes())
    assert of.keys() == TOKENS.keys()
    assert not {name: of[name] for name, most in TOKENS.items() if of[name] > most}


def sizes() -> str:
    """Return the numbers of keys, commands and public names, which have no limit."""
    from oneloop.cli import COMMANDS
    from oneloop.recipe.schema import Recipe

    keys = sum(
        len(dataclasses.fields(group.type)) if dataclasses.is_dataclass(group.type) else 1
        for group in dataclasses.fields(Recipe)
    )
    public = sum(
        not node.name.startswith("_")
        for file in files(PACKAGE)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    )
    return f"{keys} keys, {len(COMMANDS)} commands, {public} public functions and classes"


def test_the_code_breathes():
    found = measures(files(PACKAGE), PACKAGE)
    assert found.dense == []
    assert found.pairs <= PAIRS
    assert found.all_tokens / found.code <= TOKENS_PER_LINE
    assert found.comments / found.lines >= COMMENTS
    for file in files(PACKAGE):
        source = file.read_text()
        count = sum(tokens(source, separators=True).values())
        assert count <= TOKENS_PER_LINE_OF_A_FILE * len(code_lines(source)), file


@pytest.mark.parametrize(
    "source",
    [
        "x = 1  # " + "too wide " * 11,
        "x = [" + "1, " * 20 + "]",
        "x = a if b else (c if d else e)",
        "a() if b else c()",
        "x = [one * two + other_name for one in some_first_values for two in some_second_values]",
        "x = [[one * two for one in some_first_values] for two in some_second_values_and_more]",
        "def f():\n    how = {'a': 1}\n    g(**how)",
        "def f():\n    how: dict[str, int] = dict(a=1)\n    how |= {'b': 2}\n    g(**how)",
        "def f():\n    g(**{'a': 1})",
    ],
)
def test_dense_code_is_found(source):
    assert len(list(dense(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def long(" + "a, " * 26 + "b): ...",
        "from module import " + "a, " * 20 + "b",
        "x = [a * b for a in first for b in second]",
        "x = [[a for a in b] for b in c]",
        "def f(**keywords):\n    g(**keywords)",
        "def f(given):\n    g(**given)",
        "x = a if b else c",
        "x = ('one sentence, ' f'{which} is longer')",
    ],
)
def test_flat_code_is_not(source):
    assert list(dense(source)) == []


def test_pairs_are_counted_but_not_swaps_or_results():
    pairs = [is_pair(node) for node in ast.parse("a, b = 1, 2\na, b = b, a\na, b = f()").body]
    assert pairs == [True, False, False]


SAMPLE = '''"""A docstring."""

name = f"{one!r:>{width}} and {two['key']}" "adjacent"  # a comment
answer = call(name, (1, 2.5), key=[-3])
"""a docstring of an attribute"""
'''
SAMPLE_TOKENS = {False: {3: 3, 4: 10}, True: {3: 3, 4: 19}}


def test_a_formatter_cannot_change_the_tokens():
    assert sum(tokens(SAMPLE).values()) == sum(tokens(SAMPLE.replace('" "', " ")).values())
    for separators, counts in SAMPLE_TOKENS.items():
        assert tokens(SAMPLE, separators=separators) == counts


def pythons() -> list[str]:
    """Return the oldest and the newest other Python on this machine, if there are any."""
    found = {}
    for minor in range(10, 20):
        of_pyenv = Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python")
        for path in [shutil.which(f"python3.{minor}"), *map(str, of_pyenv)]:
            if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
                found[minor] = path
    return sorted({found[min(found)], found[max(found)]}) if found else []


def test_tokens_are_the_same_on_the_oldest_and_the_newest_python(tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from code_measures import tokens; "
        "print({s: dict(tokens(open(sys.argv[2]).read(), separators=s)) for s in (False, True)})"
    )
    helpers = Path(code_measures.__file__).parent
    for python in pythons():
        command = [python, "-c", code, str(helpers), str(tmp_path / "sample.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert ast.literal_eval(done.stdout) == SAMPLE_TOKENS, python


def stored(function: ast.FunctionDef) -> set[str]:
    """Return names stored in a function's own scope, without arguments, comprehensions and nested
    functions."""
    own_scope = (
        ast.FunctionDef | ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    )
    names, left = set(), list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if not isinstance(node, own_scope):
            left += ast.iter_child_nodes(node)
    return names


def imported(tree: ast.Module) -> list[str]:
    """Return the names that a module imports, without those of its ``__main__`` blocks."""
    names = []
    nodes = [node for node in tree.body if "__main__" not in ast.unparse(node)]
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return names


def test_imported_names_are_counted_but_not_those_of_the_main_block():
    source = "import a.b\nfrom c import d as e, f\ndef g():\n    import h\n"
    source += "if __name__ == '__main__':\n    import i\n"
    assert imported(ast.parse(source)) == ["a.b", "e", "f", "h"]


def test_the_loop_is_one_page():
    source = (PACKAGE / "train.py").read_text()
    tree = ast.parse(source)
    (train,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "train")
    assert len(source.splitlines()) - len(code_measures.docstring_lines(source)) <= 240
    assert length(train) <= 150
    assert len(imported(tree)) <= 20, imported(tree)
    assert len(stored(train)) <= 45
    assert sum(isinstance(node, ast.FunctionDef) for node in ast.walk(train)) - 1 <= 2
    for call in ("accelerator.accumulate(", "accelerator.backward(", "clip_(", "guard.step("):
        assert call in ast.unparse(tree)


def classes() -> dict[str, ast.ClassDef]:
    trees = (ast.parse(file.read_text()) for file in files(PACKAGE))
    return {
        node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)
    }


def fields(kind: ast.ClassDef, known: dict[str, ast.ClassDef]) -> set[str]:
    """Return the attributes that a class and its bases set on ``self``."""
    bases = (
        known[base.id] for base in kind.bases if isinstance(base, ast.Name) and base.id in known
    )
    own = {
        node.attr
        for node in ast.walk(kind)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return own.union(*(fields(base, known) for base in bases))


PATHS = {  # name: (most files, [(file, words that lead to the next file)])
    "a batch from disk to update": (
        6,
        [
            ("tasks/augmentation.py", "def __getitem__"),
            ("data/seeded_samples.py", "class Batches"),
            ("data/step_batches.py", "Batches(samples, collate)", "\ndef groups("),
            ("loop/steps.py", "loaded = groups(", "class StepBatches"),
            ("train.py", "= StepBatches(", "guard.step("),
            ("optim/bad_step_guard.py", "self.optimizer.step()"),
        ],
    ),
    "ema.half_life from the key to the EMA weights": (
        4,
        [
            ("recipe/schema.py", "half_life: Duration"),
            ("job/build.py", "half_life=half_life", "emas=emas"),
            ("train.py", "in job.emas", "ema.update("),
            ("ema.py", "half_life: float", "average_("),
        ],
    ),
    "SIGTERM to the saved checkpoint": (
        8,
        [
            ("launch/signals.py", "signal.Signals(number)", "def requested"),
            ("loop/steps.py", "stopping.requested", "group.stop ="),
            ("train.py", "group.stop", "upkeep.save()"),
            ("loop/upkeep.py", "state.save("),
            ("checkpoint/resume.py", "checkpoints.save("),
            ("checkpoint/checkpoints.py", "SaveRequest(", "self.begin("),
            ("checkpoint/background_save.py", "SaveRequest"),
            ("checkpoint/save_request.py", "class SaveRequest"),
        ],
    ),
    "a NaN to the skipped step": (
        5,
        [
            ("train.py", "contagious(loss", "upkeep.judge(step)"),
            ("optim/bad_step_guard.py", "def contagious", "found_inf"),
            ("loop/upkeep.py", "def judge", "bad_steps.answer("),
            ("optim/bad_step_policy.py", "def answer"),
        ],
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_reader_opens_few_files_to_follow(name):
    most, steps = PATHS[name]
    assert len(steps) <= most
    for file, *words in steps:
        source = (PACKAGE / file).read_text()
        assert all(word in source for word in words), (file, words)


def test_no_test_imports_a_test():
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert not [module for module in imports(file) if module.startswith("test_")], file
