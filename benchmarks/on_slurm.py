"""launch/slurm.sbatch on a real Slurm: what is requeued, what is not, and whether the result is the
same.

    python benchmarks/on_slurm.py --folder /shared/on-slurm

Needs sbatch, two idle nodes, `oneloop` on the PATH, a folder that both nodes see, and two
partitions, low and high, of which high preempts low by requeueing. It submits real jobs:
undisturbed; ended by the time limit; preempted; with a wrong key; cancelled by scancel; stopped by
a STOP file. It prints a transcript. Takes about 30 minutes, because Slurm lets a requeued job wait
for two minutes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "launch" / "slurm.sbatch"
RUN = (
    "digits --batch.grain 32 --duration {steps} --save.every 10s --eval.every 2000 --log.every 500 "
    "--run.dir {run}"
)
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def shell(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def about(job: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\S*)", shell("scontrol", "show", "job", job)))


class Case:
    """One job, watched until it ends. ``act`` is called once, when the run has a checkpoint."""

    def __init__(self, folder: Path, name: str, steps: int, *options: str, more: str = "") -> None:
        self.name, self.run, self.log = name, folder / name, folder / f"{name}.log"
        keys = f"{RUN.format(steps=steps, run=self.run)} {more}".split()
        typed = [*options, f"--output={self.log}", str(SCRIPT), *keys]
        shown = " ".join([*options, "launch/slurm.sbatch", *keys]).replace(str(folder), "…")
        print(f"\n== {name}: sbatch --nodes 2 {shown}")
        self.job = shell("sbatch", "--parsable", "--nodes", "2", *typed).strip()
        self.began = time.monotonic()

    def watch(self, act=None, seconds: float = 1500) -> str:
        last, state = "", ""
        while time.monotonic() - self.began < seconds:
            known = about(self.job)
            state = known.get("JobState", "?")
            line = f"{state} restarts={known.get('Restarts')} exit={known.get('ExitCode')}"
            if line != last:
                print(f"  {time.monotonic() - self.began:5.0f} s  {line}", flush=True)
                last = line
            if (
                act is not None
                and state == "RUNNING"
                and any(self.run.glob("checkpoints/step-*/MANIFEST.json"))
            ):
                act()
                act = None
            if state in ENDED:
                break
            time.sleep(0.5)
        self.restarts = int(about(self.job).get("Restarts", "0"))
        return state

    def tell(self) -> None:
        """Print the lines of the log that say how each start began and ended, and the summary."""
        for line in self.log.read_text().splitlines():
            if re.search(
                r"resum|stopped|done;|error|unknown key|rendezvous|requeue|CANCELLED|PREEMPT", line
            ):
                print(f"  | {line.replace(str(self.run.parent), '…')[:160]}")
        if (file := self.run / "summary.json").exists():
            summary = json.loads(file.read_text())
            print(
                f"  summary: exit code {summary['exit_code']}, {summary['exit_reason']}, step "
                f"{summary['step']}"
            )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--steps", type=int, default=12000)
    given = options.parse_args()
    folder, steps = given.folder.absolute(), given.steps
    folder.mkdir(parents=True)
    os.chdir(folder)
    print(
        f"{date.today()}: {shell('sinfo', '--version').strip()}, two nodes; python "
        f"{sys.version.split()[0]}, ",
        end="",
    )
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "accelerate", "oneloop")))
    checks: dict[str, bool] = {}

    plain = Case(folder, "undisturbed", steps)
    checks["undisturbed: completed, never requeued"] = (plain.watch(), plain.restarts) == (
        "COMPLETED",
        0,
    )
    plain.tell()

    timed = Case(folder, "time-limit", steps, "--time=7")
    checks["time limit: completed after at least one requeue"] = (
        timed.watch() == "COMPLETED" and timed.restarts > 0
    )
    timed.tell()

    kept: list[str] = []

    def preempt() -> None:
        words = (
            "--partition=high",
            "--nodes=2",
            "--exclusive",
            "--output=/dev/null",
            "--wrap",
            "sleep 20",
        )
        kept.append(shell("sbatch", "--parsable", *words).strip())
        print(f"         job {kept[0]} of partition high is submitted")

    early = Case(folder, "preempted", steps, "--partition=low")
    checks["preemption: completed after one requeue"] = (early.watch(preempt), early.restarts) == (
        "COMPLETED",
        1,
    )
    early.tell()

    wrong = Case(folder, "bad-input", steps, more="--batch.sice 8")
    checks["bad input: failed once, not requeued"] = (wrong.watch(), wrong.restarts) == (
        "FAILED",
        0,
    )
    wrong.tell()

    ended = Case(folder, "scancel", steps)
    checks["scancel: cancelled, not requeued"] = (
        ended.watch(lambda: shell("scancel", ended.job)),
        ended.restarts,
    ) == (
        "CANCELLED",
        0,
    )
    time.sleep(15)
    ended.tell()

    file = Case(folder, "stop-file", steps)
    checks["STOP file: exit code 75, not requeued"] = (
        file.watch(lambda: (file.run / "STOP").touch()),
        file.restarts,
        about(file.job)["ExitCode"],
    ) == ("FAILED", 0, "75:0")
    file.tell()

    print()
    for case in (timed, early):
        words = ["oneloop", "verify", str(plain.run), "--same", str(case.run)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        shown = (
            f"oneloop verify undisturbed --same {case.name}: exit code {done.returncode}; "
            f"{done.stdout.strip()}"
        )
        print(shown.replace(str(folder), "…"))
        checks[f"{case.name}: bit-identical to the undisturbed run"] = done.returncode == 0
    print()
    for name, held in checks.items():
        print(f"{'yes' if held else 'NO '}  {name}")
    sys.exit(0 if all(checks.values()) else 1)


if __name__ == "__main__":
    main()
