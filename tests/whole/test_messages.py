"""Error messages are plain English: short sentences without words of the old dialect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from code_measures import statements
from worlds import ROOT

pytestmark = pytest.mark.covers()

PACKAGE = ROOT / "src" / "oneloop"
WORDS = 25  # maximum words per sentence
OTHERS = {"self.wrong", "contract.wrong", "self.contract.wrong", "dry.contract.wrong"}
"""their text follows "my_task.py:MyTask.loss\""""
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
Sources = list[tuple[Path, ast.Module]]
BEGINS = re.compile(r"(What|Where|Of)\b")
PARTICIPLE = re.compile(
    r"(?!(embedding|training|nothing|something|string|missing|expected|need)\b)[a-z]+(ing|ed)\b"
)


@pytest.fixture(scope="module")
def sources() -> Sources:
    """Return each file of the package and its tree, which several tests read."""
    return [(file, ast.parse(file.read_text())) for file in sorted(PACKAGE.rglob("*.py"))]


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
    for node in statements(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = (
                    zip(target.elts, node.value.elts, strict=False)
                    if both
                    else [(target, node.value)]
                )
                yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


def messages(sources: Sources) -> Iterator[tuple[str, str, str]]:
    """Yield (file and line, raised class, template) of every error that is raised with a text."""
    for file, tree in sources:
        top = dict(
            assigned(ast.Module([node for node in tree.body if isinstance(node, ast.Assign)], []))
        )
        for function in statements(tree):
            if isinstance(function, ast.FunctionDef):
                names = top | dict(assigned(function))
                for node in statements(function):
                    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                        kind = ast.unparse(node.exc.func)
                        for text in (template(one, names) for one in node.exc.args):
                            if re.search("[a-z]{2}", text.replace("X", "")):
                                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", kind, text


SEARCHED = 40  # first characters of a message, which a user may search for in the source


def is_text(node: ast.expr) -> bool:
    """Return whether an expression is a sentence, or a part of one: text of several words."""
    if isinstance(node, ast.IfExp):
        return is_text(node.body) or is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return is_text(node.left) or is_text(node.right)
    if isinstance(node, ast.JoinedStr):
        return sum(len(ast.unparse(part).split()) for part in node.values) > 4
    return isinstance(node, ast.Constant) and len(str(node.value).split()) > 3


def begins_with_fragment(message: ast.expr, texts: set[str]) -> bool:
    """Return whether a message begins with the text of a variable, or with a condition.

    Args:
        message: the argument of a raise.
        texts: names of local variables that hold text.
    """
    if isinstance(message, ast.BinOp | ast.IfExp):
        return is_text(message)
    if isinstance(message, ast.Name):
        return message.id in texts
    if not isinstance(message, ast.JoinedStr):
        return False
    length = 0
    for part in message.values:
        if length >= SEARCHED:
            return False
        if isinstance(part, ast.Constant):
            length += len(str(part.value))
            continue
        assert isinstance(part, ast.FormattedValue)
        if isinstance(part.value, ast.Name) and part.value.id in texts:
            return True
    return False


def fragments(tree: ast.Module) -> list[int]:
    """Return the lines of raises whose message begins with a fragment."""
    found = []
    for function in statements(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        texts = {name for name, value in assigned(function) if is_text(value) and name != "message"}
        for node in statements(function):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            if node.exc.args and begins_with_fragment(node.exc.args[0], texts):
                found.append(node.lineno)
    return found


MOST_FRAGMENTS = 2  # where a variable adds a few words to the first forty characters


def test_the_beginning_of_a_message_can_be_searched_for(sources):
    found = {}
    for file, tree in sources:
        lines = fragments(tree)
        if lines:
            found[str(file.relative_to(PACKAGE))] = lines
    assert sum(map(len, found.values())) <= MOST_FRAGMENTS, found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("why = 'it is not a number at all'; raise ValueError(f'{why}; set another')", 1),
        (
            "why = 'it is not a number at all'; raise ValueError(f'task.data: {why}; set another')",
            1,
        ),
        ("why = f'{x} is not a good number'; raise ValueError(why)", 1),
        ("raise ValueError('this is one sentence' if x else 'this is another sentence')", 1),
        ("raise ValueError(f'{x} is not a number; set another')", 0),
        (
            (
                "why = 'it is not a number at all'; "
                "raise ValueError(f'task.data must be the path of a file or folder: {why}')"
            ),
            0,
        ),
        ("raise ValueError('this is one sentence ' f'of two literals {x}')", 0),
    ],
)
def test_fragments_are_found(code, expected):
    assert len(fragments(ast.parse(f"def f(x):\n    {code}"))) == expected


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


def test_every_error_is_plain_english(sources):
    found = list(messages(sources))
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
    """Yield the pages without their code blocks."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for page in pages:
        text = page.read_text()
        yield (
            str(page.relative_to(ROOT)),
            re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE),
        )


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of a Python file."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def test_docs_and_docstrings_have_no_word_of_the_dialect():
    texts = list(prose())
    assert len(texts) > 50

    # Only a file with such a word anywhere can have a docstring with it: the others need no tree.
    files = [
        file for room in ("src", "tests", "benchmarks") for file in (ROOT / room).rglob("*.py")
    ]
    assert len(files) > 500
    for file in sorted(files):
        source = file.read_text()
        if PROSE.search(source):
            name = file.relative_to(ROOT)
            texts += [(f"{name}:{line}", text) for line, text in docstrings(source)]
    assert len(texts) > 1000
    wrong = {place: [found[0] for found in PROSE.finditer(text)] for place, text in texts}
    assert not {place: words for place, words in wrong.items() if words}


def test_words_of_the_dialect_are_found_in_docstrings_only():
    source = 'told = 1\ndef f():\n    """It is told."""\n    return "told"\n'
    found = [(line, bool(PROSE.search(text))) for line, text in docstrings(source)]
    assert found == [(1, False), (2, True)]
