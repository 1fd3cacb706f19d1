"""Seconds after a fault of a run on two hosts: sudo python benchmarks/two_hosts.py [--repeats 10]
[--cases "link cut"].

The hosts are network namespaces of this machine (needs root and iproute2). Each case trains the
digits with batch.grain on both, causes one fault after the first checkpoints, and waits for the
end. Columns, in seconds after the fault: reported (the first message that names the rank or node),
ended (all processes that the fault concerns), first step (the first log line after the restart).
"same": the final weights are bit-identical to those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import lab

KEYS = f"{lab.KEYS} --duration 100 --batch.grain 16".replace("--batch.micro 16", "")


def final(folder: Path) -> bytes:
    """Return the final weights' file."""
    return (folder / "run" / "final" / "model.safetensors").read_bytes()


def summary(values: list[float]) -> str:
    """Return "median (least to most)"."""
    return (
        f"{statistics.median(values):6.1f} ({min(values):.1f} to {max(values):.1f})"
        if values
        else "-"
    )


def main() -> None:
    """Print one line per repeat, and the table last."""
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=10)
    options.add_argument("--cases", nargs="*", default=list(lab.CASES))
    given = options.parse_args()
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, torch {version('torch')}",
        flush=True,
    )
    table = {}
    with lab.two_hosts():
        whole = Path(tempfile.mkdtemp())
        words = f"--config_file single {lab.written_task(whole)} {KEYS} --run.dir run".split()
        assert lab.Node(words, whole).ended(180) == 0
        for case in given.cases:
            rows = []
            for repeat in range(given.repeats):
                folder = Path(tempfile.mkdtemp())
                keys = f"{lab.written_task(folder)} {KEYS}"
                seen = lab.fault(case, folder, keys, port=29400 + repeat)
                if case == "store killed":  # the others end; the same command resumes
                    again = lab.Node(f"--config_file single {keys} --run.dir run".split(), folder)
                    assert again.ended(180) == 0
                same = final(folder) == final(whole)
                rows.append((seen.reported, seen.ended, seen.first_step, same))
                step = f"{seen.first_step:.1f}" if seen.first_step else "-"
                codes = f"exit codes {seen.codes}"
                print(
                    f"{case} {repeat}: {seen.reported:.1f} {seen.ended:.1f} {step} same {same} "
                    f"{codes}",
                    flush=True,
                )
            table[case] = rows
    print(f"\n{'case':14} {'reported':24} {'ended':24} {'first step':24} same")
    for case, rows in table.items():
        columns = [
            summary([row[column] for row in rows if row[column] is not None]) for column in range(3)
        ]
        print(
            f"{case:14} " + " ".join(f"{column:24}" for column in columns),
            f"{sum(r[3] for r in rows)}/{len(rows)}",
        )


if __name__ == "__main__":
    main()
