"""Print the map of files in CONTRIBUTING.md from the first lines of docstrings.

python docs/map_of_files.py writes it into CONTRIBUTING.md.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "oneloop"
PAGE = ROOT / "CONTRIBUTING.md"
START = "```\nsrc/oneloop/\n"
END = "docs/                   "


def first_line(file: Path) -> str:
    """Return the first line of a file's docstring, without the full stop."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    return (docstring or "").partition("\n")[0].removesuffix(".")


def entries(folder: Path, indent: str = "  ") -> list[str]:
    """Return a line for each file and folder, files first."""
    lines = []
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            lines.append(f"{indent + file.name:30}{first_line(file)}")
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if (inner / "__init__.py").exists():
            lines.append(f"{indent + inner.name + '/':30}{first_line(inner / '__init__.py')}")
            lines += entries(inner, indent + "  ")
    return lines


def page() -> str:
    """Return CONTRIBUTING.md with the present map."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest[rest.index(END) :]
    return f"{before}{START}{chr(10).join(entries(PACKAGE))}\n{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
