"""Pairs of docstrings and functions of Python's standard library."""

import ast
import warnings
from collections.abc import Iterator

from oneloop.tasks.rows.text_files import held_out_files, stdlib


def docstring_pairs() -> dict[str, list[tuple[str, str]]]:
    """Return pairs by split: the first paragraph of a docstring, and its function without it.

    Only functions with at least two more lines count. No file is in two splits.
    """
    pairs: dict[str, list[tuple[str, str]]] = {}
    for split, files in held_out_files(stdlib(), percent=10).items():
        pairs[split] = []
        for file in files:
            pairs[split] += _functions(file.text)
    return pairs


def _functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a Python file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        # Take the source after the docstring, which is the first statement.
        docstring = ast.get_docstring(node)
        body = list[str]()
        for part in node.body[1:]:
            body += lines[part.lineno - 1 : part.end_lineno]
        if docstring and docstring.strip() and len(body) >= 2:
            paragraph = docstring.strip().split("\n\n")[0]
            head = f"def {node.name}({ast.unparse(node.args)}):"
            yield " ".join(paragraph.split()), "\n".join([head, *body])
