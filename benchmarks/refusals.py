"""What becomes of a user's mistakes: exit code, last line, and what is written, in two checkouts side by side.

    git worktree add ../before COMMIT
    python benchmarks/refusals.py ../before .

The cases are those of tests/silent_cases.py, run as tests/worlds.py runs them; a run that does not end in a minute is
killed. A table in Markdown, on standard output.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
WIDTH = 150


def take(checkout: Path, to: Path) -> None:
    """Runs every case with the code of ``checkout``, and writes what became of each."""
    sys.path[:0] = [str(checkout / "tests"), str(HERE.parent / "tests")]
    import worlds

    assert str(checkout) in worlds.__file__
    from silent_cases import ALL
    from test_nothing_silent import here, laid, words

    found = {}
    for name, case in ALL.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            before = laid(folder, case)
            options = {"ranks": case.ranks, "config": case.config, "timeout": 60.0, "folder": folder}
            try:
                world = worlds.run(here, words(case), **options)
                code, output = next((c for c in world.codes if c), 0), world.output
            except AssertionError as hung:
                code, output = "none in 60 s", str(hung)
            lines = [line for line in output.splitlines() if line.strip() and not line.startswith("--- rank")]
            told = [line for line in lines if line.startswith("oneloop: ")]
            last = told[0] if told else lines[-1] if lines else ""
            written = {path for path in folder.rglob("*") if "__pycache__" not in path.parts} - before
            top = sorted({path.relative_to(folder).parts[0] for path in written})
            what = (
                ", ".join(top) + (" with final/" if (folder / "run" / "final").exists() else "") if top else "nothing"
            )
            found[name] = {"code": code, "last": last.replace(scratch, "."), "written": what}
    to.write_text(json.dumps(found))


def main() -> None:
    if sys.argv[1] == "--take":
        take(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    checkouts = [Path(word).resolve() for word in sys.argv[1:3]]
    with tempfile.TemporaryDirectory() as scratch:
        tables = []
        for number, checkout in enumerate(checkouts):
            file = Path(scratch) / f"{number}.json"
            path = f"{checkout / 'src'}:{checkout / 'tests'}:{HERE.parent / 'tests'}"
            subprocess.run(
                [sys.executable, __file__, "--take", str(checkout), str(file)],
                env={**os.environ, "PYTHONPATH": path},
                check=True,
            )
            tables.append(json.loads(file.read_text()))
    print(f"python benchmarks/refusals.py BEFORE AFTER, {date.today()}, Python {platform.python_version()}\n")
    print("| case | | exit code | last line | written |\n|---|---|---|---|---|")
    for name in tables[1]:
        for which, table in zip(("before", "now"), tables, strict=True):
            row = table[name]
            line = row["last"].replace("|", "\\|").strip()
            line = line if len(line) <= WIDTH else line[:WIDTH] + " …"
            print(f"| {name if which == 'before' else ''} | {which} | {row['code']} | {line} | {row['written']} |")


if __name__ == "__main__":
    main()
