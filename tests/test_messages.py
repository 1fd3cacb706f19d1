"""Error messages are plain English: short sentences without words of the old dialect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from worlds import ROOT

PACKAGE = ROOT / "src" / "oneloop"
WORDS = 25  # maximum words per sentence
OTHERS = {"self.wrong", "contract.wrong"}  # their text follows "my_task.py:MyTask.loss"
DIALECT = re.compile(
    r"\b(told|tells?|said|says?|lies?|stands?|stood|goes on|gone on|go on|anew|is no|is none|are no|none of|nor"  # noqa: E501
    r"|asked for|a person|people|figures?|wreck|stance|at all|usual|otherwise|parts|leaf|leaves|there already"  # noqa: E501
    r"|without a word|somebody|one's own|theirs|beside|of its own|another one|put (it |that )?back|trouble|averages"  # noqa: E501
    r"|the same bits|where)\b"
)
PROSE = re.compile(
    r"\b(told|tells?|lies|stood|goes on|gone on|go on|anew|a person|wreck|stance|trainee|trouble|theirs|asked for"  # noqa: E501
    r"|somebody|one's own|put (it |that )?back|the same bits|to the bit|must get here|without a word|held out)\b",  # noqa: E501
    re.IGNORECASE,
)
"""words of the dialect that neither a page nor a docstring needs"""
BEGINS = re.compile(r"(What|Where|Of)\b")
PARTICIPLE = re.compile(
    r"(?!(embedding|training|nothing|something|string|missing|expected|need)\b)[a-z]+(ing|ed)\b"
)


def template(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> str:
    """Return the text of an expression, with X for each inserted value; local variables are
    followed."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part, names, depth) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return template(node.value, names, depth)
    if isinstance(node, ast.IfExp):
        return template(node.body, names, depth)
    if isinstance(node, ast.BinOp):
        return template(node.left, names, depth) + template(node.right, names, depth)
    if isinstance(node, ast.Name) and node.id in names and depth < 4:
        return template(names[node.id], names, depth + 1)
    return "X"


def assigned(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if both
                    else [(target, node.value)]
                )
                yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def messages() -> Iterator[tuple[str, str, str]]:
    """Yield (file and line, raised class, template) of every error that is raised with a text."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        top = dict(
            assigned(ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], []))
        )
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                names = top | dict(assigned(function))
                for node in ast.walk(function):
                    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                        kind = ast.unparse(node.exc.func)
                        for text in (template(one, names) for one in node.exc.args):
                            if re.search("[a-z]{2}", text.replace("X", "")):
                                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", kind, text


def faults(kind: str, text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.?!])\s+|;\s+", text):
        if len(sentence.split()) > WORDS:
            yield f"{len(sentence.split())} words"
        if BEGINS.match(sentence) or (PARTICIPLE.match(sentence) and kind not in OTHERS):
            yield f"begins with {sentence.split()[0]}"
    if glued := re.search(r"X(?!final)[a-z]{3,}|\w  \w", text):
        yield f"no space, or two: {glued[0]!r}"
    for found in DIALECT.finditer(text):
        yield repr(found[0])


def test_every_error_is_plain_english():
    found = list(messages())
    assert len(found) > 400
    wrong = {f"{place}: {text}": list(faults(kind, text)) for place, kind, text in found}
    assert not {place: why for place, why in wrong.items() if why}


def test_the_check_finds_what_it_looks_for():
    assert [*faults("BadInput", "Where the data has no parts")]
    assert [*faults("BadInput", "batch.size 96 is no number; leave it")] == ["'is no'"]
    assert [*faults("ValueError", " ".join(["word"] * 26))] == ["26 words"]
    assert [*faults("BadInput", "runs/oneXhas no EMA")]
    assert not [*faults("BadInput", "batch.size must be at least 1, got 0")]


def prose() -> Iterator[tuple[str, str]]:
    """Yield the pages without their code blocks, and the docstrings of all Python files."""
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        yield (
            str(page.relative_to(ROOT)),
            re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE),
        )
    for file in (
        file
        for room in ("src", "tests", "benchmarks")
        for file in sorted((ROOT / room).rglob("*.py"))
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield (
                    f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}",
                    ast.get_docstring(node) or "",
                )


def test_docs_and_docstrings_have_no_word_of_the_dialect():
    texts = list(prose())
    assert len(texts) > 3000
    wrong = {place: [found[0] for found in PROSE.finditer(text)] for place, text in texts}
    assert not {place: words for place, words in wrong.items() if words}
