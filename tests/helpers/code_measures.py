"""How dense Python code is: tokens of code, and the expressions that readers stumble over.

    python tests/helpers/code_measures.py [FOLDER ...]

prints the measures of each folder. ``tests/whole/test_house.py`` sets limits on those of ``src/``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_SEPARATORS = set("()[]{},")
# Python 3.12 and newer divide an f-string into several tokens.
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)
ONE_LINE = 80  # columns that an expression inside another may take
LONG_LINE = 100


@lru_cache(4)
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which several measures of the file read."""
    return ast.parse(source)


@lru_cache(4)
def nodes(source: str) -> list[ast.AST]:
    """Return all nodes of the tree of a source."""
    return list(ast.walk(parsed(source)))


def statements(tree: ast.AST) -> list[ast.AST]:
    """Return a node and the statements in it, in the order of ``ast.walk``.

    They are a fifth of all nodes.
    """
    found = [tree]
    for node in found:
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            found += getattr(node, block, ())
    return found


@lru_cache(4)
def docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines of docstrings, including those of attributes."""
    lines = set[int]()
    for node in nodes(source):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        if isinstance(node.value.value, str) and node.end_lineno is not None:
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def tokens(source: str, *, separators: bool = False) -> Counter[int]:
    """Return the number of tokens of code by line.

    These are names, keywords, numbers, strings and operators. Comments and docstrings do not count.
    An f-string is one token, and so are adjacent strings, so that a formatter cannot change the
    sum. ``separators``: count brackets and commas, too.
    """
    counted, brackets = _tokens(source)
    return counted + brackets if separators else counted.copy()


@cache
def _tokens(source: str) -> tuple[Counter[int], Counter[int]]:
    """Return the numbers of tokens, and of brackets and commas, by line."""
    docstrings = docstring_lines(source)
    counted = Counter[int]()
    brackets = Counter[int]()
    depth = 0  # of f-strings
    after_string = False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == _FSTRING_END:
            depth -= 1
            continue
        is_string = token.type in (tokenize.STRING, _FSTRING_START)
        inside = depth > 0
        depth += token.type == _FSTRING_START
        if inside or token.type in _LAYOUT:
            continue
        if is_string and (after_string or token.start[0] in docstrings):
            continue
        after_string = is_string
        separates = token.type == tokenize.OP and token.string in _SEPARATORS
        (brackets if separates else counted)[token.start[0]] += 1
    return counted, brackets


@cache
def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that are not blank, not a comment and not a docstring."""
    docstrings = docstring_lines(source)
    code = set[int]()
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#") and number not in docstrings:
            code.add(number)
    return code


def width(source: str, node: ast.expr) -> int:
    """Return the columns that an expression needs on one line."""
    segment = ast.get_source_segment(source, node) or ""
    one_line = re.sub(r"\s+", " ", segment)
    one_line = re.sub(r"([(\[{]) ", r"\1", one_line)
    return len(re.sub(r",? ([)\]}])", r"\1", one_line))


def inside(node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
    """Return whether a node holds another one of these kinds."""
    return any(isinstance(one, kinds) for one in ast.walk(node) if one is not node)


def is_pair(node: ast.AST) -> bool:
    """Return whether a statement is ``a, b = x, y``, and not a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    names = {ast.unparse(one) for one in target.elts}
    return names != {ast.unparse(one) for one in node.value.elts}


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions inside it."""
    left = list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, FUNCTIONS):
            left += ast.iter_child_nodes(node)


def _is_dict(node: ast.AST | None) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_dict(node.left) or _is_dict(node.right)
    if isinstance(node, ast.IfExp):
        return _is_dict(node.body) or _is_dict(node.orelse)
    built = isinstance(node, ast.Call) and ast.unparse(node.func) in ("dict", "dict.fromkeys")
    return built or isinstance(node, ast.Dict | ast.DictComp)


@lru_cache(4)
def splatted_dicts(source: str) -> list[tuple[int, str]]:
    """Return (line, text) of each ``f(**d)`` whose ``d`` was built in the same function."""
    found: list[tuple[int, str]] = []
    for function in nodes(source):
        if not isinstance(function, FUNCTIONS):
            continue
        built = set[str]()
        own = list(_own_nodes(function))
        for node in own:
            if isinstance(node, ast.Assign) and _is_dict(node.value):
                built.update(ast.unparse(target) for target in node.targets)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign) and _is_dict(node.value):
                built.add(ast.unparse(node.target))
        for node in own:
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg is not None:
                        continue
                    if _is_dict(keyword.value) or ast.unparse(keyword.value) in built:
                        found.append((node.lineno, f"**{ast.unparse(keyword.value)[:40]}"))
    return found


def dense(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, what) of each place that breaks a rule on density."""
    for number, line in enumerate(source.splitlines(), 1):
        if len(line) > LONG_LINE:
            yield number, f"{len(line)} columns"
    exempt = set[int]()  # signatures and imports
    for node in nodes(source):
        if isinstance(node, FUNCTIONS):
            exempt.update(range(node.lineno, max(node.body[0].lineno, node.lineno + 1)))
        elif isinstance(node, ast.Import | ast.ImportFrom) and node.end_lineno is not None:
            exempt.update(range(node.lineno, node.end_lineno + 1))
    for number, count in tokens(source, separators=True).items():
        if count > 30 and number not in exempt:
            yield number, f"{count} tokens on a line"
    for node in nodes(source):
        if isinstance(node, ast.IfExp) and inside(node, (ast.IfExp,)):
            yield node.lineno, "a conditional expression inside another"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp):
            yield node.lineno, "a conditional expression as a statement"
        elif isinstance(node, COMPREHENSIONS):
            if len(node.generators) > 1 and width(source, node) > ONE_LINE:
                yield (
                    node.lineno,
                    f"a comprehension with several for, {width(source, node)} columns",
                )
            if inside(node, COMPREHENSIONS) and width(source, node) > ONE_LINE:
                yield node.lineno, f"a comprehension around another, {width(source, node)} columns"
    for number, text in splatted_dicts(source):
        yield number, f"{text}, a dict that was built in the same function"


@dataclass
class Measures:
    """Sums over files."""

    files: int = 0
    lines: int = 0
    not_blank: int = 0
    columns: int = 0  # of all lines that are not blank
    over_100: int = 0
    code: int = 0  # lines
    all_tokens: int = 0  # with brackets and commas
    tokens: int = 0
    busy: int = 0  # lines of 20 tokens or more, with brackets and commas
    statements: int = 0  # without docstrings
    comments: int = 0  # full lines
    docstrings: int = 0  # lines
    pairs: int = 0
    comprehensions: int = 0
    nested: int = 0
    several: int = 0
    conditionals: int = 0
    walruses: int = 0
    splatted: int = 0
    longest: int = 0  # lines of a function
    dense: list[str] = field(default_factory=list)

    def add(self, name: str, source: str) -> None:
        """Add a file."""
        lines = source.splitlines()
        counts = tokens(source, separators=True)
        self.files += 1
        self.lines += len(lines)
        for line in lines:
            self.not_blank += bool(line.strip())
            self.columns += len(line)
            self.over_100 += len(line) > LONG_LINE
            self.comments += line.lstrip().startswith("#")
        self.code += len(code_lines(source))
        self.all_tokens += sum(counts.values())
        self.tokens += sum(tokens(source).values())
        self.busy += sum(count >= 20 for count in counts.values())
        self.docstrings += len(docstring_lines(source))
        for node in nodes(source):
            self._node(node)
        self.splatted += len(splatted_dicts(source))
        self.dense += [f"{name}:{line}: {what}" for line, what in dense(source)]

    def _node(self, node: ast.AST) -> None:
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        self.statements += isinstance(node, ast.stmt) and not text
        self.pairs += is_pair(node)
        self.conditionals += isinstance(node, ast.IfExp)
        self.walruses += isinstance(node, ast.NamedExpr)
        if isinstance(node, COMPREHENSIONS):
            self.comprehensions += 1
            self.nested += inside(node, COMPREHENSIONS)
            self.several += len(node.generators) > 1
        if isinstance(node, FUNCTIONS):
            assert node.end_lineno is not None
            self.longest = max(self.longest, node.end_lineno - node.lineno + 1)

    def table(self) -> dict[str, str]:
        """Return the measures by name, as text."""
        thousand = self.statements / 1000
        return {
            "files": f"{self.files:,}",
            "lines": f"{self.lines:,}",
            "tokens of code": f"{self.tokens:,}",
            "mean line that is not blank": f"{self.columns / self.not_blank:.1f}",
            "lines over 100 columns": f"{self.over_100 / self.lines:.1%}",
            "tokens per line of code, with brackets": f"{self.all_tokens / self.code:.1f}",
            "lines of 20 tokens or more": f"{self.busy / self.code:.1%}",
            "full-line comments": f"{self.comments / self.lines:.1%}",
            "docstring lines": f"{self.docstrings / self.lines:.1%}",
            "longest function": f"{self.longest}",
            "a, b = x, y": f"{self.pairs}",
            "per 1,000 statements: comprehensions": f"{self.comprehensions / thousand:.1f}",
            "nested comprehensions": f"{self.nested / thousand:.1f}",
            "several for in one": f"{self.several / thousand:.1f}",
            "conditional expressions": f"{self.conditionals / thousand:.1f}",
            ":=": f"{self.walruses / thousand:.1f}",
            "f(**d) of a dict built there": f"{self.splatted}",
            "places that break a rule": f"{len(self.dense)}",
        }


def measures(files: list[Path], root: Path) -> Measures:
    """Return the measures of these files; places are named relative to ``root``."""
    found = Measures()
    for file in files:
        found.add(str(file.relative_to(root)), file.read_text())
    return found


def main() -> None:
    listing = "--list" in sys.argv
    for name in [word for word in sys.argv[1:] if word != "--list"] or ["src/oneloop"]:
        path = Path(name)
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found = measures(files, path if path.is_dir() else path.parent)
        print(name)
        if listing:
            print("\n".join(found.dense))
            continue
        for title, value in found.table().items():
            print(f"  {title:42}{value:>10}")


if __name__ == "__main__":
    main()


def imports(file: Path, *, within_functions: bool = True) -> Iterator[str]:
    """Return the modules that a file imports; ``from oneloop import train`` counts as
    ``oneloop.train``."""
    return iter(_imports(file.read_text(), within_functions))


@cache
def _imports(source: str, within_functions: bool) -> list[str]:
    """Return the modules that a source imports. Copies of a file are parsed once."""
    inside = set[int]()
    if not within_functions:
        for outer in statements(parsed(source)):
            if isinstance(outer, FUNCTIONS):
                inside.update(id(inner) for inner in statements(outer))

    found: list[str] = []
    for node in statements(parsed(source)):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{ast.unparse(node)} imports by dots"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found
