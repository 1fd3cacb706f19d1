"""Compare two checkouts on a user's mistakes: exit code, last line, and written files.

    git worktree add ../before COMMIT
    python benchmarks/refusals.py ../before .

The cases of tests/helpers/silent_cases.py run as in worlds.py. A run that does not end within a
minute is killed. The output is a Markdown table.
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
from typing import Any

HERE = Path(__file__).resolve().parent
WIDTH = 150


def take(checkout: Path, to: Path) -> None:
    """Run every case with the code of ``checkout``, and write each outcome."""
    # Older checkouts have no folders in tests/.
    (cases,) = (checkout / "tests").rglob("test_nothing_silent.py")
    sys.path[:0] = [
        str(checkout / "tests" / "helpers"),
        str(cases.parent),
        str(HERE.parent / "tests" / "helpers"),
    ]
    import worlds

    assert str(checkout) in worlds.__file__
    from silent_cases import ALL
    from test_nothing_silent import here, laid, words

    found = {}
    for name, case in ALL.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            before = laid(folder, case)
            options = {
                "ranks": case.ranks,
                "config": case.config,
                "timeout": 60.0,
                "folder": folder,
            }
            found[name] = became(worlds, here, words(case), options, before)
    to.write_text(json.dumps(found | resumed(worlds)))


def became(
    worlds: Any, function: Any, words: list[str], options: dict[str, Any], before: set[Path]
) -> dict[str, Any]:
    """Return exit code, the most informative line, and the written files."""
    folder = options["folder"]
    try:
        world = worlds.run(function, words, **options)
        code, output = next((c for c in world.codes if c), 0), world.output
    except AssertionError as hung:
        code, output = "none in 60 s", str(hung)
    lines = [
        line for line in output.splitlines() if line.strip() and not line.startswith("--- rank")
    ]
    marks = ("oneloop: ", "accepted: ")
    errors = [
        line
        for line in lines
        if line.startswith(marks) or " is damaged" in line or " is not what " in line
    ]
    last = errors[0] if errors else lines[-1] if lines else ""
    written = {path for path in folder.rglob("*") if "__pycache__" not in path.parts} - before
    top = sorted({path.relative_to(folder).parts[0] for path in written})
    final = " with final/" if (folder / "run" / "final").exists() else ""
    return {
        "code": code,
        "last": last.replace(str(folder), "."),
        "written": ", ".join(top) + final if top else "nothing",
    }


def resumed(worlds: Any) -> dict[str, Any]:
    """Return the outcome of a run that is killed after step 8, and restarted with something changed
    or damaged."""
    from silent_cases import CHANGES, DAMAGE, WORDS, lay, unfinished
    from test_nothing_silent import here

    changes: dict[str, Any] = {
        f"resume: {name}": (given[0], given[1], None) for name, given in CHANGES.items()
    }
    changes["resume: another dtype"] = ("    pass", [], "dtype")
    for file in ("recipe.yaml", "metrics.jsonl", "summary.json"):
        changes |= {
            f"{file} {kind}": ("    pass", [], (file, change)) for kind, change in DAMAGE.items()
        }
    found = {}
    for name, (members, launched, damage) in changes.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder, words = Path(scratch), list(WORDS)
            lay(folder)
            worlds.run(here, words, folder=folder).ok()
            if name.startswith("resume") or damage[0] != "summary.json":
                unfinished(folder / "run")
            lay(folder, members)
            if damage == "dtype":
                words += ["--machine.dtype", "float64"]
            elif damage:
                file = folder / "run" / damage[0]
                file.write_bytes(damage[1](file.read_bytes()))
            options = {"options": launched, "timeout": 60.0, "folder": folder}
            found[name] = became(worlds, here, words, options, set(folder.rglob("*")))
    return found


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
    print(
        f"python benchmarks/refusals.py BEFORE AFTER, {date.today()}, Python "
        f"{platform.python_version()}\n"
    )
    print("| case | | exit code | last line | written |\n|---|---|---|---|---|")
    for name in tables[1]:
        for which, table in zip(("before", "now"), tables, strict=True):
            row = table[name]
            line = row["last"].replace("|", "\\|").strip()
            line = line if len(line) <= WIDTH else line[:WIDTH] + " …"
            print(
                f"| {name if which == 'before' else ''} | {which} | {row['code']} | {line} | "
                f"{row['written']} |"
            )


if __name__ == "__main__":
    main()
