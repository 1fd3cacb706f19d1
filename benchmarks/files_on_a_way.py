"""Count the files of oneloop that a reader passes on the way from a cause to its effect.

    python benchmarks/files_on_a_way.py
    python benchmarks/files_on_a_way.py --list                    # and their names
    git worktree add ../before 95c85fa
    python benchmarks/files_on_a_way.py --source ../before/src src    # a column for each

Each way is one or two commands. A recorder notes each function of oneloop that runs in a process of
these commands; the body of a module or class does not count. There are two measures:

- A batch: the files with a function that runs in three steps, in the main thread of training. That
  is loading, loss, gradients and update, but no log line, evaluation or save.
- The other ways: the whole commands, from the first line to the exit, less a control: the same
  commands without the cause (the key, the signal, the NaN, the mirror). The control of a plan is
  training of the same recipe. A file counts if at least one of its functions runs on the way and
  not in the control. So the division of a file that every run uses changes no number, unless it
  has such a function. A branch in a function that both run is not seen. Each source is compared
  only with its own control, so that new names and places of files play no role.

All commands of the second measure run twice. If a function runs in one of two equal runs only, it
depends on time (heartbeats, the supervisor) and does not count on any way. Two sources are measured
at the same time, in about eleven minutes on two cores.

--list prints the files, with the functions that only the way runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import __version__ as accelerate_version

HERE = Path(__file__).resolve().parent
ONELOOP = [sys.executable, "-m", "oneloop"]
LAUNCH = [*ONELOOP, "launch", "--config_file", "single"]
DIGITS = [*LAUNCH, "digits", "--run.dir", "run", "--track", "none"]
IN_STEPS = "files with a function that runs in three steps of training"
NOT_IN_CONTROL = "files with a function that runs on the way and not in its control"
STEPS = "4-7"
BATCH = ["--duration", "9", "--eval.every", "0", "--save.every", "0", "--log.every", "100"]
BATCH += ["--machine.workers", "0"]  # load in the training process
EVALUATIONS = ["--duration", "20", "--eval.every", "10"]
SAVES = ["--save.every", "20"]

# One sample of the digits has a loss of NaN in training (the control: none).
BAD = """
from oneloop.basics.heartbeats import BEATS, TRAINING
from oneloop.tasks.image_classification import ImageClassification


class Bad(ImageClassification):
    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        training = BEATS.now_in.startswith(TRAINING) and model.training
        bad = training and SAMPLE in batch["index"].tolist()
        return loss * float("nan") if bad else loss, outputs
"""
BAD_RECIPE = "task: {name: bad.Bad, data: digits}\nduration: 1ep\nsave: {every: 5}\ntrack: []\n"
TEXT_RECIPE = """
task: {name: causal_lm, data: texts, pack: packed, layers: 1, heads: 2, width: 16, block: 64}
batch: {size: 8}
track: []
"""
PAIR_RECIPE = """
task: {name: preference, data: pairs.jsonl, layers: 1, heads: 2, width: 16, length: 64}
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


def train_pairs(folder: Path) -> None:
    pairs = []
    for number in range(200):
        pair = {
            "prompt": f"{number} is",
            "chosen": f" {number}",
            "rejected": " none" * (number % 3),
        }
        pairs.append({**pair, "rejected": f" no{pair['rejected']}"})
    lines = [json.dumps(pair) + "\n" for pair in pairs]
    (folder / "pairs.jsonl").write_text("".join(lines))
    (folder / "pair.yaml").write_text(PAIR_RECIPE)
    finished([*LAUNCH, "pair.yaml", "--run.dir", "run", *BATCH], folder)


def train_digits(folder: Path, *keys: str) -> None:
    finished([*DIGITS, *keys], folder)


def plan_digits(folder: Path) -> None:
    finished([*ONELOOP, "plan", "digits"], folder)


def stop_by_signal(folder: Path) -> None:
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen([*DIGITS, *SAVES], cwd=folder, stdout=output, stderr=output)
        while process.poll() is None and not list(folder.glob("run/checkpoints/step-*")):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    if code != 75:
        sys.exit(f"SIGTERM led to exit code {code}:\n{(folder / 'output').read_text()}")


def bad_step(folder: Path, policy: str, code: int, sample: int = 7) -> None:
    (folder / "bad.py").write_text(BAD.replace("SAMPLE", str(sample)))
    (folder / "bad.yaml").write_text(BAD_RECIPE)
    words = ["bad.yaml", "--guard.nonfinite", policy, "--run.dir", "run"]
    finished([*LAUNCH, *words], folder, code=code)


def no_bad_step(folder: Path, policy: str) -> None:
    bad_step(folder, policy, 0, sample=-1)


def train_to(folder: Path, address: str, duration: str) -> None:
    words = ["--track", "none", "--run.dir", address, "--duration", duration, "--save.every", "10"]
    words += ["--run.accept_changes", "true"]  # the duration is another after the resume
    finished([*LAUNCH, "digits", *words], folder)


def train_to_mirror(folder: Path, duration: str = "20") -> None:
    train_to(folder, f"file://{folder}/bucket/run", duration)


def train_to_folder(folder: Path, duration: str = "20") -> None:
    train_to(folder, "run", duration)


def resume_from_mirror(folder: Path) -> None:
    # The folder "runs" is the local copy.
    train_to_mirror(folder)
    shutil.rmtree(folder / "runs")
    (folder / "record").unlink()
    train_to_mirror(folder, "40")


def resume_from_folder(folder: Path) -> None:
    train_to_folder(folder)
    (folder / "record").unlink()
    train_to_folder(folder, "40")


Run = Callable[[Path], None]


@dataclass(frozen=True)
class Way:
    """A command, or two, on whose way the files are counted.

    Attributes:
        name: what the commands do.
        run: runs them in an empty folder.
        control: runs the same commands without the cause; their functions do not count.
        steps: count only these steps (empty: everything).
    """

    name: str
    run: Run
    control: Run | None = None
    steps: str = ""


def bad_way(policy: str, code: int) -> Way:
    run = partial(bad_step, policy=policy, code=code)
    return Way(f"NaN loss, {policy}", run, partial(no_bad_step, policy=policy))


WAYS = [
    Way("a batch of the digits", lambda folder: train_digits(folder, *BATCH), steps=STEPS),
    Way("a batch of packed text", train_texts, steps=STEPS),
    Way("a batch of packed pairs", train_pairs, steps=STEPS),
    Way(
        "ema.half_life to evaluation",
        lambda folder: train_digits(folder, *EVALUATIONS, "--ema.half_life", "320"),
        lambda folder: train_digits(folder, *EVALUATIONS),
    ),
    Way("SIGTERM to exit code 75", stop_by_signal, lambda folder: train_digits(folder, *SAVES)),
    bad_way("stop", 3),
    bad_way("skip", 0),
    bad_way("rewind", 0),
    Way("oneloop plan digits", plan_digits, train_to_folder),
    Way("train to a mirror", train_to_mirror, train_to_folder),
    Way("resume from a mirror", resume_from_mirror, resume_from_folder),
]


class Function(NamedTuple):
    """A function that ran: its file (relative to the package), first line and qualified name."""

    file: str
    line: int
    name: str


Files = dict[str, list[str]]
"""the names of functions, for each file"""


def functions_of(run: Run, source: Path, steps: str = "") -> set[Function]:
    """Return the functions of ``source``/oneloop that run."""
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
        os.environ["RECORD_STEPS"] = steps
        run(folder)
        lines = (folder / "record").read_text().splitlines()

    # Several processes may have recorded the same function.
    found = set()
    for recorded in lines:
        path, line, name = recorded.split("\t")
        found.add(Function(path.removeprefix(package), int(line), name))
    return found


def by_file(functions: set[Function]) -> Files:
    files: Files = {}
    for function in sorted(functions):
        files.setdefault(function.file, []).append(function.name)
    return files


def ways_named(parts: Sequence[str]) -> list[Way]:
    return [way for way in WAYS if any(part in way.name for part in parts)]


def measure(source: Path, parts: Sequence[str]) -> tuple[list[Files], Files]:
    """Return the files on each way, and the functions that run in one of two equal runs only.

    Args:
        source: the folder that contains the package oneloop.
        parts: parts of the names of ways.
    """
    # Run each command twice. A control of two ways is one command.
    ways = ways_named(parts)
    commands = []
    for way in ways:
        if way.control is not None:
            commands += [way.run, way.control]
    commands = list(dict.fromkeys(commands))
    first = {command: functions_of(command, source) for command in commands}
    second = {command: functions_of(command, source) for command in commands}

    # Heartbeats and watchers run functions at some times only, such as after a slow start.
    by_chance: set[Function] = set()
    for command in commands:
        by_chance |= first[command] ^ second[command]

    # The files of each way.
    found = []
    for way in ways:
        if way.control is None:
            functions = functions_of(way.run, source, way.steps)
        else:
            functions = first[way.run] - first[way.control] - by_chance
        found.append(by_file(functions))
    return found, by_file(by_chance)


def commit(source: Path) -> str:
    """Return the commit of a checkout (its path if it is none)."""
    command = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or str(source)


def print_files(files: Files, *, functions: bool) -> None:
    for file, names in files.items():
        print(f"  {file}: {', '.join(names)}" if functions else f"  {file}")


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

    # Measure the sources at the same time, each in a process with its own environment.
    with ProcessPoolExecutor(len(sources)) as pool:
        measured = list(pool.map(partial(measure, parts=given.ways), sources))

    # A row for each way, below a heading that says what is counted.
    ways = ways_named(given.ways)
    heading = ""
    for index, way in enumerate(ways):
        if heading != (IN_STEPS if way.control is None else NOT_IN_CONTROL):
            heading = IN_STEPS if way.control is None else NOT_IN_CONTROL
            print(f"\n{heading}:")
        print(f"{way.name:28}", *(f"{len(found[index]):9}" for found, _ in measured))

    if given.list:
        for index, way in enumerate(ways):
            for name, (found, _) in zip(commits, measured, strict=True):
                print(f"\n{way.name}, {name}:")
                print_files(found[index], functions=way.control is not None)
        for name, (_, by_chance) in zip(commits, measured, strict=True):
            print(f"\nfunctions that ran in one of two equal runs only, {name}:")
            print_files(by_chance, functions=True)


if __name__ == "__main__":
    main()
