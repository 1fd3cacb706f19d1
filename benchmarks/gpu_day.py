"""One command for a machine with a GPU: it checks, measures and records.

    PYTHONPATH=src python benchmarks/gpu_day.py --part check --minutes 9 --to benchmarks
    PYTHONPATH=src python benchmarks/gpu_day.py --call A --to benchmarks    # then B, C, ...
    PYTHONPATH=src python benchmarks/gpu_day.py --part speed --only gpt2,llama-1b
    PYTHONPATH=src python benchmarks/gpu_day.py --part check,bits,plan,faults --jobs 5
    PYTHONPATH=src python benchmarks/gpu_day.py --toy         # all parts, small, on a CPU
    PYTHONPATH=src python benchmarks/gpu_day.py --list
    PYTHONPATH=src python benchmarks/gpu_day.py --packages    # what pip must install for the lines

The parts are check (what must hold), speed (oneloop beside a plain loop and other libraries), bits
(batch.grain), plan (predicted beside measured memory) and faults (out of memory, kills, NaN). Each
is a list of lines, the most valuable first; a line runs in a process of its own. No line is started
that does not fit into the minutes; those are listed as left. --jobs runs lines side by side, except
those that measure time or fill the memory: they run alone, after the others. The results are in
DATE-gpu.json and .txt, written after each line; a second call on the same day adds to them.
A line is skipped only without CUDA, with one GPU if it needs two, or if a package is missing. A
line that does not return its numbers has failed. The exit code is 1 if a line fails.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter, deque
from datetime import date, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

# The caller imports libraries and forks; it never touches CUDA, which children could not use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

import torch

import gpu_check
import gpu_costs
import gpu_faults
import gpu_levers
import gpu_meetings
import gpu_more
import gpu_own_loop
import gpu_preference
import gpu_speed
import gpu_tasks
import oneloop
import plan_on_gpu
import same_bits_gpu
from gpu_lines import FORK, LINES, PARTS, Line, Outcome, Running, requirements

# Each registers lines.
MODULES = (
    gpu_check,
    gpu_meetings,
    gpu_tasks,
    gpu_own_loop,
    gpu_speed,
    gpu_costs,
    gpu_levers,
    gpu_preference,
    gpu_more,
    same_bits_gpu,
    plan_on_gpu,
    gpu_faults,
)
PACKAGES = (
    "torch",
    "accelerate",
    "transformers",
    "triton",
    "torchvision",
    "timm",
    "peft",
    "trl",
    "liger-kernel",
    "torchao",
)


class Call(NamedTuple):
    """Lines for one lease of a GPU, the most valuable first."""

    lines: tuple[str, ...]
    jobs: int = 1


# Each takes at most nine minutes; the last lines may be left out. The most valuable calls come
# first. A runs on any card; the others need up to 115 GiB.
CALLS = {
    "A": Call(
        (
            "parts_of_own_loops",
            "programs_of_own_loops",
            "loader_batches",
            "deterministic_numbers",
            "deterministic_distil",
            "deterministic_preference",
            "log_probabilities_of_gpu_and_cpu",
            "loader_in_fp16",
            "deterministic_bert",
            "reward_in_bf16",
            "peaks_of_the_data_sheet",
            "gpt2",
            "llama-1b",
            "out_of_memory",
        ),
        jobs=5,
    ),
    "B": Call(("lora-8b", "lora-8b-levers")),
    "C": Call(("llama-1b-rivals", "checkpoint-stall-large", "first-steps")),
    "D": Call(("lora-8b-rivals", "first-steps")),
    "E": Call(("preference-1b-rivals", "largest-micro-batch")),
    "F": Call(("gpt2-levers", "three-minutes")),
    "G": Call(("vit-s16-rivals", "resnet50-rivals", "fp8-llama-1b", "linear-cross-entropy")),
}
assert {name for call in CALLS.values() for name in call.lines} <= {one.name for one in LINES}
CARD = "card"  # the line that measures the rates of this card, before all others of speed
SLACK = 5.0  # seconds that must remain when a line has taken as long as expected
CROWDED = 1.5  # times the expected seconds, of a line that runs beside others


def machine(toy: bool) -> dict[str, Any]:
    """Describe this machine. A child asks CUDA, so that this process does not touch it."""
    ours, theirs = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_ask_cuda, args=(theirs, toy))
    child.start()
    theirs.close()
    try:
        described: dict[str, Any] = ours.recv()
    except EOFError:
        described = {"device": "CUDA cannot be used in a forked process", "gpus": 0}
    child.join()
    versions = {"python": platform.python_version(), "oneloop": oneloop.__version__}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    return {
        **described,
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
        "commit": _commit(),
    }


def _ask_cuda(answers: Any, toy: bool) -> None:
    if toy or not torch.cuda.is_available():
        answers.send({"device": "cpu", "gpus": 0})
        return
    properties = torch.cuda.get_device_properties(0)
    answers.send(
        {
            "device": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "driver": _driver(),
        }
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return _output(command).splitlines()[0] if _output(command) else "unknown"


def _commit() -> str:
    """Return the commit of the checkout, with a mark if files have changed since."""
    folder = ["git", "-C", str(Path(__file__).parent)]
    changed = _output([*folder, "status", "--porcelain", "--untracked-files=no"])
    found = _output([*folder, "rev-parse", "--short", "HEAD"])
    return f"{found}{' and changes' if changed else ''}" if found else "unknown"


def _output(command: list[str]) -> str:
    """Return what a command prints; nothing if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Record:
    """The results of a day, as JSON and as text, in files that grow line by line."""

    def __init__(self, folder: Path, about: dict[str, Any], *, toy: bool) -> None:
        stem = f"{date.today()}-gpu{'-toy' if toy else ''}"
        self._json = folder / f"{stem}.json"
        self._text = folder / f"{stem}.txt"
        folder.mkdir(parents=True, exist_ok=True)
        earlier = json.loads(self._json.read_text()) if self._json.exists() else {}
        command = " ".join(["python", "benchmarks/gpu_day.py", *sys.argv[1:]])
        self.calls: list[dict[str, Any]] = [*earlier.get("calls", [])]
        self.calls.append({"command": command, **about})
        self.outcomes: list[dict[str, Any]] = earlier.get("lines", [])
        self.earlier = len(self.outcomes)  # outcomes of earlier calls
        self.left: list[str] = []

    def add(self, outcome: Outcome, card: str) -> None:
        outcome.card = card
        outcome.when = datetime.now().isoformat(timespec="seconds")
        self.outcomes.append({**outcome.as_dict(), "call": len(self.calls)})
        self.write()

    def write(self) -> None:
        """Write both files."""
        self.calls[-1]["left"] = self.left
        content = {"calls": self.calls, "lines": self.outcomes}
        draft = self._json.with_suffix(".draft")
        draft.write_text(json.dumps(content, indent=1))
        draft.replace(self._json)
        self._text.write_text("\n".join(self._lines()) + "\n")

    def _lines(self) -> list[str]:
        lines = []
        for number, call in enumerate(self.calls, 1):
            versions = ", ".join(f"{name} {one}" for name, one in call["versions"].items())
            lines.append(f"# call {number}, {date.today()}: {call['command']}")
            lines.append(f"# {call['device']}, commit {call['commit']}; {versions}")
            if call.get("jobs", 1) > 1:
                lines.append(f"# {call['jobs']} lines at a time: times of these lines say little")
        for outcome in self.outcomes:
            lines += ["", headline(outcome)]
            for name, value in outcome.get("numbers", {}).items():
                lines.append(f"    {name:44}{value:16,.6g}")
            for title, rows in outcome.get("tables", {}).items():
                lines += [f"    {title}", *(f"      {row}" for row in table(rows))]
            lines += [f"    | {text}" for text in outcome.get("log", [])]
        for number, call in enumerate(self.calls, 1):
            if call.get("left"):
                names = ", ".join(call["left"])
                lines += ["", f"left by call {number}, because they did not fit: {names}"]
        return lines


def headline(outcome: dict[str, Any]) -> str:
    """Return the line that the terminal and the text show for an outcome."""
    seconds = f"{outcome['seconds']:6.1f} s"
    title = f"{outcome['part']}/{outcome['name']}"
    call = f"[{outcome['call']}] " if "call" in outcome else ""
    return f"{call}{outcome['outcome']:8}{title:44}{seconds}  {outcome['says']}"


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return rows as aligned text, with the names of their columns first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in cells]


def _cell(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def parsed() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--part", default=",".join(PARTS), help="parts (default: all)")
    options.add_argument(
        "--call", choices=sorted(CALLS), help="lines of one lease, in place of --part"
    )
    options.add_argument("--only", default="", help="names of lines, separated by commas")
    options.add_argument("--minutes", type=float, help="default: 9; for --toy 60")
    options.add_argument("--jobs", type=int, help="lines that run side by side (default: 1)")
    options.add_argument("--to", type=Path, default=Path(), help="folder of the records")
    options.add_argument("--toy", action="store_true", help="run small shapes on a CPU")
    options.add_argument("--list", action="store_true", help="list the lines")
    options.add_argument(
        "--packages", action="store_true", help="list what pip must install for the lines"
    )
    given = options.parse_args()
    if given.jobs is not None and given.jobs < 1:
        options.error(f"--jobs {given.jobs}: at least one line must run")
    if given.only and not given.only.strip(","):
        options.error("--only names no line")
    return given


def chosen_lines(parts: list[str], only: str, call: Call | None = None) -> list[Line]:
    """Return the lines to run, in order. Exit with 2 for a name that does not exist."""
    if call is not None:
        by_name = {one.name: one for one in LINES}
        return [by_name[name] for name in (CARD, *call.lines)]
    if unknown := set(parts) - set(PARTS):
        print(f"unknown parts: {', '.join(sorted(unknown))}; known: {PARTS}", file=sys.stderr)
        sys.exit(2)
    names = [name for name in only.split(",") if name]
    of_part = [one for one in LINES if one.part in parts]
    # Of a part, the lines that only compare more loops come last.
    of_part.sort(key=lambda one: (PARTS.index(one.part), one.name.endswith("-others")))
    if unknown := set(names) - {one.name for one in of_part}:
        known = ", ".join(one.name for one in of_part)
        print(f"unknown lines: {', '.join(sorted(unknown))}; known: {known}", file=sys.stderr)
        sys.exit(2)
    chosen = [one for one in of_part if not names or one.name in names]
    # Floors come from the rates of this card, so they are measured in every call.
    if any(one.part == "speed" for one in chosen) and CARD not in {one.name for one in chosen}:
        chosen.insert(0, next(one for one in LINES if one.name == CARD))
    return chosen


def perform(
    chosen: list[Line],
    record: Record,
    about: dict[str, Any],
    *,
    until: float,
    jobs: int,
    toy: bool,
) -> None:
    """Run lines, at most ``jobs`` at a time, until a time on the clock of time.monotonic."""
    rates: dict[str, float] = {}
    waiting = deque(chosen)
    running: list[Running] = []

    def ended(outcome: Outcome) -> None:
        record.add(outcome, about["device"])
        print(headline(outcome.as_dict() | {"seconds": outcome.seconds}), flush=True)

    while waiting or running:
        # Start what can be started. A line that must be alone waits for the others, they for it.
        while waiting and len(running) < jobs:
            one = waiting[0]
            if running and (one.alone or running[0].line.alone):
                break
            waiting.popleft()
            left = until - time.monotonic()
            needed = one.seconds * (CROWDED if jobs > 1 and not one.alone else 1)
            if reason := one.why_skipped(about["gpus"]):
                ended(Outcome(one.part, one.name, "skipped", reason))
            elif (0 if toy else needed) + SLACK > left:
                record.left.append(f"{one.part}/{one.name}")
                record.write()
            else:
                running.append(Running(one, toy=toy, rates=rates, limit=left))

        # Wait for a line that has ended, or for the end of the minutes.
        if not running:
            continue
        left = max(0.0, until - time.monotonic())
        ready = wait([one.answers for one in running], timeout=left)
        over = [one for one in running if one.answers in ready] or running
        running = [one for one in running if one not in over]
        for one in over:
            outcome = one.outcome()
            if outcome.name == CARD:
                rates.update(outcome.numbers)
            ended(outcome)


def main() -> None:
    given = parsed()
    call = CALLS[given.call] if given.call else None
    chosen = chosen_lines(given.part.split(","), given.only, call)
    jobs = given.jobs or (call.jobs if call else 1)
    if given.list:
        for one in chosen:
            print(f"{one.part:8}{one.name:40}{one.seconds:5.0f} s")
        return
    if given.packages:
        print("\n".join(requirements(chosen)))
        return
    if jobs > 1:
        chosen.sort(key=lambda one: one.alone)
    began = time.monotonic()
    minutes = given.minutes or (60 if given.toy else 9)
    about = machine(given.toy)
    if not (about["gpus"] or given.toy):
        sys.exit(f"there is no GPU ({about['device']}); --toy runs what can be run without one")
    print(f"{about['device']}, {about['gpus']} GPUs; {len(chosen)} lines in {minutes:g} minutes")

    until = began + 60 * minutes
    record = Record(given.to, {**about, "jobs": jobs}, toy=given.toy)
    perform(chosen, record, about, until=until, jobs=jobs, toy=given.toy)
    outcomes = record.outcomes[record.earlier :]
    counts = Counter(outcome["outcome"] for outcome in outcomes)
    if record.left:
        print(f"left, because they did not fit: {', '.join(record.left)}")
    ran = counts["pass"] + counts["fail"]
    print(
        f"{ran} lines ran: {counts['pass']} passed, {counts['fail']} failed; "
        f"{counts['skipped']} skipped, {len(record.left)} left"
    )
    sys.exit(bool(counts["fail"]))


if __name__ == "__main__":
    main()
