"""Count the files of oneloop that a reader passes on the way from a cause to its effect.

    python benchmarks/files_on_a_way.py
    python benchmarks/files_on_a_way.py --list                    # and their names
    git worktree add ../before 95c85fa
    python benchmarks/files_on_a_way.py --source ../before/src src    # a column for each

Each way is one or two commands. A file counts if one of its functions runs in a process of these
commands; the body of a module or class does not count. The two ways of a batch are only the work
of three steps in the main thread of training: loading, loss, gradients and update, but no log line,
evaluation or save. The other ways are all that the commands do, from the first line to the exit.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from accelerate import __version__ as accelerate_version

HERE = Path(__file__).resolve().parent
ONELOOP = [sys.executable, "-m", "oneloop"]
LAUNCH = [*ONELOOP, "launch", "--config_file", "single"]
DIGITS = [*LAUNCH, "digits", "--run.dir", "run", "--track", "none"]
STEPS = "4-7"
BATCH = ["--duration", "9", "--eval.every", "0", "--save.every", "0", "--log.every", "100"]
BATCH += ["--machine.workers", "0"]  # load in the training process

# One sample of the digits has a loss of NaN in training.
BAD = """
from oneloop.basics.heartbeats import BEATS, TRAINING
from oneloop.tasks.image_classification import ImageClassification


class Bad(ImageClassification):
    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        bad = BEATS.now_in.startswith(TRAINING) and model.training and 7 in batch["index"].tolist()
        return loss * float("nan") if bad else loss, outputs
"""
BAD_RECIPE = "task: {name: bad.Bad, data: digits}\nduration: 1ep\nsave: {every: 5}\ntrack: []\n"
TEXT_RECIPE = """
task: {name: causal_lm, data: texts, pack: packed, layers: 1, heads: 2, width: 16, block: 64}
batch: {size: 8}
track: []
"""


def finished(command: Sequence[str], folder: Path, *, code: int = 0) -> None:
    """Run a command, which must exit with ``code``."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"{command} exited with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr}")


def train_texts(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(40):
        lines = [f"file {number}, line {line}" for line in range(number % 7 + 3)]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    (folder / "text.yaml").write_text(TEXT_RECIPE)
    finished([*LAUNCH, "text.yaml", "--run.dir", "run", *BATCH], folder)


def train_with_ema(folder: Path) -> None:
    keys = ["--ema.half_life", "320", "--duration", "20", "--eval.every", "10"]
    finished([*DIGITS, *keys], folder)


def stop_by_signal(folder: Path) -> None:
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [*DIGITS, "--save.every", "20"], cwd=folder, stdout=output, stderr=output
        )
        while process.poll() is None and not list(folder.glob("run/checkpoints/step-*")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    if code != 75:
        sys.exit(f"SIGTERM led to exit code {code}:\n{(folder / 'output').read_text()}")


def bad_step(folder: Path, policy: str, code: int) -> None:
    (folder / "bad.py").write_text(BAD)
    (folder / "bad.yaml").write_text(BAD_RECIPE)
    words = ["bad.yaml", "--guard.nonfinite", policy, "--run.dir", "run"]
    finished([*LAUNCH, *words], folder, code=code)


def mirrored(folder: Path, duration: str) -> None:
    address = f"file://{folder}/bucket/run"
    words = ["--track", "none", "--run.dir", address, "--duration", duration, "--save.every", "10"]
    words += ["--run.accept_changes", "true"]  # the duration is another after the resume
    finished([*LAUNCH, "digits", *words], folder)


def resume_from_mirror(folder: Path) -> None:
    # The folder "runs" is the local copy.
    mirrored(folder, "20")
    shutil.rmtree(folder / "runs")
    (folder / "record").unlink()
    mirrored(folder, "40")


@dataclass(frozen=True)
class Way:
    """Commands whose files are counted.

    Attributes:
        name: what they do.
        run: runs them in an empty folder.
        steps: count only these steps (empty: everything).
    """

    name: str
    run: Callable[[Path], None]
    steps: str = ""


WAYS = [
    Way("a batch of the digits", lambda folder: finished([*DIGITS, *BATCH], folder), STEPS),
    Way("a batch of packed text", train_texts, STEPS),
    Way("ema.half_life to evaluation", train_with_ema),
    Way("SIGTERM to exit code 75", stop_by_signal),
    Way("NaN loss, stop", lambda folder: bad_step(folder, "stop", 3)),
    Way("NaN loss, skip", lambda folder: bad_step(folder, "skip", 0)),
    Way("NaN loss, rewind", lambda folder: bad_step(folder, "rewind", 0)),
    Way("oneloop plan digits", lambda folder: finished([*ONELOOP, "plan", "digits"], folder)),
    Way("train to a mirror", lambda folder: mirrored(folder, "20")),
    Way("resume from a mirror", resume_from_mirror),
]


def files_on(way: Way, source: Path) -> list[str]:
    """Return the files of ``source``/oneloop on a way, relative to it."""
    package = f"{source}{os.sep}oneloop{os.sep}"
    with tempfile.TemporaryDirectory() as scratch:
        # Each process imports sitecustomize at its start, if PYTHONPATH has one.
        start = Path(scratch, "start")
        start.mkdir()
        shutil.copy(HERE / "function_recorder.py", start / "sitecustomize.py")
        folder = Path(scratch, "folder")
        folder.mkdir()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(start), str(source), str(folder)])
        os.environ["ONELOOP_CACHE"] = str(Path(scratch, "cache"))
        os.environ["RECORD_SOURCE"] = package
        os.environ["RECORD_TO"] = str(folder / "record")
        os.environ["RECORD_STEPS"] = way.steps
        way.run(folder)
        return sorted({name[len(package) :] for name in (folder / "record").read_text().split()})


def commit(source: Path) -> str:
    """Return the commit of a checkout (its path if it is none)."""
    command = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or str(source)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        nargs="+",
        type=Path,
        default=[HERE.parent / "src"],
        help="folders that contain the package oneloop",
    )
    parser.add_argument("--ways", nargs="+", default=[""], help="parts of the names of ways")
    parser.add_argument("--list", action="store_true", help="also print the names of the files")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sources = [source.resolve() for source in given.source]

    # The header: command, machine, and all files of each source.
    print(f"# {date.today()}  python benchmarks/files_on_a_way.py {' '.join(sys.argv[1:])}")
    print(
        f"# {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ",
        end="",
    )
    print(f"torch {torch.__version__}, accelerate {accelerate_version}")
    commits = [commit(source) for source in sources]
    print(f"{'':28}", *(f"{name:>9}" for name in commits))
    numbers = [len(list(source.glob("oneloop/**/*.py"))) for source in sources]
    print(f"{'all Python files':28}", *(f"{number:9}" for number in numbers))

    # A row for each way.
    lists = []
    for way in WAYS:
        if not any(part in way.name for part in given.ways):
            continue
        files = [files_on(way, source) for source in sources]
        print(f"{way.name:28}", *(f"{len(one):9}" for one in files), flush=True)
        lists.append((way, files))

    if given.list:
        for way, files in lists:
            for name, names in zip(commits, files, strict=True):
                print(f"\n{way.name}, {name}:")
                print("\n".join(f"  {name}" for name in names))


if __name__ == "__main__":
    main()
