"""Do the default tests find planted faults? Change one expression of a function, and run its tests.

    python benchmarks/planted_faults.py CHECKOUT --to faults.json
    python benchmarks/planted_faults.py OTHER_CHECKOUT --to faults.json   # the same faults
    python benchmarks/planted_faults.py --compare faults.json

A fault is another comparison, another sign or another number in a random function of a random
module of each room of ``src/oneloop``. For each fault, the default tests of the files whose marker
``covers`` lists the module run until one fails. The checkout is changed meanwhile, and restored.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PER_ROOM = 3
SECONDS = 3000  # for the tests of one fault; a test that hangs has found it

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
}


@dataclass(frozen=True)
class Fault:
    """One changed expression.

    Args:
        file: path from ``src``.
        function: name of the function, with those of its classes.
        before: the expression.
        after: the changed expression.
        which: number of the expression among equal ones of this function.
    """

    file: str
    function: str
    before: str
    after: str
    which: int

    @property
    def room(self) -> str:
        """Return the folder of ``src/oneloop``, or the name of a file in it."""
        return Path(self.file).parts[1]

    @property
    def module(self) -> str:
        """Return the name of the module."""
        return ".".join(Path(self.file).with_suffix("").parts)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions and methods of a module, with their names."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    while waiting:
        name, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                waiting.append((f"{name}{child.name}.", child))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name + child.name, child


def changed(node: ast.AST) -> ast.expr | None:
    """Return the expression with another comparison, sign or number; None if it has none."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other = copy.deepcopy(node)
        other.ops[0] = COMPARISONS[type(node.ops[0])]
        return other
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        swapped = copy.deepcopy(node)
        swapped.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        return swapped
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ast.Constant(node.value + 1)
    return None


def expressions(function: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield the expressions of a function's body that can be changed, with the changed ones."""
    for statement in function.body:  # type: ignore[attr-defined]
        inside_strings = {
            id(part)
            for node in ast.walk(statement)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
        }
        for node in ast.walk(statement):
            other = changed(node)
            if other is not None and id(node) not in inside_strings:
                yield node, other


def faults_of(file: Path, source: Path) -> list[Fault]:
    """Return all faults that can be planted in a file."""
    found = []
    for name, function in functions(ast.parse(file.read_text(encoding="utf-8"))):
        seen: dict[tuple[str, str], int] = {}
        for node, other in expressions(function):
            texts = (ast.unparse(node), ast.unparse(other))
            which = seen[texts] = seen.get(texts, -1) + 1
            found.append(Fault(str(file.relative_to(source)), name, *texts, which))
    return found


def drawn(checkout: Path, seed: int) -> list[Fault]:
    """Return the faults: some functions of each room, and one expression of each."""
    source = checkout / "src"
    by_room: dict[str, dict[tuple[str, str], list[Fault]]] = {}
    for file in sorted(source.glob("oneloop/**/*.py")):
        for fault in faults_of(file, source):
            if tests_of(checkout, fault.module):
                place = by_room.setdefault(fault.room, {})
                place.setdefault((fault.file, fault.function), []).append(fault)

    generator = random.Random(seed)
    found = []
    for _, by_function in sorted(by_room.items()):
        places = sorted(by_function)
        for place in generator.sample(places, min(PER_ROOM, len(places))):
            found.append(generator.choice(by_function[place]))
    return found


def tests_of(checkout: Path, module: str) -> list[str]:
    """Return the test files that cover a module: first the one that has its name."""
    own = f"test_{module.rpartition('.')[2]}.py"
    files = [
        file
        for file in checkout.glob("tests/*/test_*.py")
        if f'"{module}"' in file.read_text(encoding="utf-8").partition("\ndef ")[0]
    ]
    files.sort(key=lambda file: (file.name != own, file))
    return [str(file.relative_to(checkout)) for file in files]


def planted(checkout: Path, fault: Fault) -> str | None:
    """Return the source of the file with the fault; None if it lacks the expression."""
    text = (checkout / "src" / fault.file).read_text(encoding="utf-8")
    for name, function in functions(ast.parse(text)):
        if name != fault.function:
            continue
        number = -1
        for node, other in expressions(function):
            if (ast.unparse(node), ast.unparse(other)) != (fault.before, fault.after):
                continue
            number += 1
            if number == fault.which:
                return _replaced(text, node, f"({fault.after})")
    return None


def _replaced(text: str, node: ast.AST, new: str) -> str:
    """Return the text with an expression replaced. (Columns of ast count bytes.)"""
    lines = [line.encode() for line in text.splitlines(keepends=True)]
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    before = lines[first][: node.col_offset]  # type: ignore[attr-defined]
    after = lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    lines[first : last + 1] = [before + new.encode() + after]
    return b"".join(lines).decode()


def is_found(checkout: Path, fault: Fault) -> tuple[bool | None, str, float]:
    """Plant a fault and run its tests: whether one fails, its name, and the seconds."""
    file = checkout / "src" / fault.file
    original = file.read_bytes()
    source = planted(checkout, fault)
    if source is None:
        return None, "this checkout lacks the expression", 0.0
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    began = time.monotonic()
    try:
        file.write_text(source, encoding="utf-8")
        done = subprocess.run(
            [*command, *tests_of(checkout, fault.module)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        name = failed[0].split()[1] if failed else ""
        return done.returncode != 0 and bool(failed), name, time.monotonic() - began
    except subprocess.TimeoutExpired:
        return True, "a test hangs", time.monotonic() - began
    finally:
        file.write_bytes(original)


def measure(checkout: Path, to: Path, *, seed: int, only: set[str]) -> None:
    """Plant all faults in a checkout, one by one, and write what was found."""
    results = json.loads(to.read_text()) if to.exists() else {"faults": [], "found": {}}
    if not results["faults"]:
        results["faults"] = [asdict(fault) for fault in drawn(checkout, seed)]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True
    ).stdout.strip()
    found = results["found"].setdefault(commit, {})
    for number, entry in enumerate(results["faults"]):
        fault = Fault(**entry)
        if str(number) in found or (only and fault.room not in only):
            continue
        is_caught, test, seconds = is_found(checkout, fault)
        found[str(number)] = [is_caught, test, round(seconds)]
        print(number, fault.file, fault.function, fault.before, "->", fault.after, end=": ")
        print("found by" if is_caught else "NOT found", test, f"{seconds:.0f} s", flush=True)
        to.write_text(json.dumps(results, indent=1) + "\n")


def compare(file: Path) -> None:
    """Print for each commit how many faults were found, and those that another one found."""
    results = json.loads(file.read_text())
    caught = {
        commit: {number for number, (is_caught, *_) in found.items() if is_caught}
        for commit, found in results["found"].items()
    }
    for commit, numbers in caught.items():
        print(f"{commit}: {len(numbers)} of {len(results['found'][commit])} faults found")
        for other, others in caught.items():
            for number in sorted(others - numbers, key=int):
                test = results["found"][other][number][1]
                fault = results["faults"][int(number)]
                print(f"  {number} {fault['file']} {fault['function']}: only {other}, by {test}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", nargs="?", type=Path)
    parser.add_argument("--to", type=Path, default=Path("faults.json"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default="", help="only these, separated by commas")
    parser.add_argument("--compare", type=Path)
    given = parser.parse_args()
    if given.compare:
        compare(given.compare)
    else:
        only = {*filter(None, given.rooms.split(","))}
        measure(given.checkout.resolve(), given.to, seed=given.seed, only=only)


if __name__ == "__main__":
    main()
