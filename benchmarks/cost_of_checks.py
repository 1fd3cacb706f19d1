"""Measure what the checks in training cost per step: `digits` and `gpt`, on one process and two.

    git worktree add ../before COMMIT
    python benchmarks/cost_of_checks.py --before ../before
    python benchmarks/cost_of_checks.py --recipe digits --ranks 1 --more "--batch.grain 16"

Each round makes these runs, in a new random order: without the checks (`--machine.check_every 0`),
with them, without them again (control), and with the code of another checkout. Runs are forked
from a warm server per checkout (tests/helpers/worlds.py). A run's value is the median duration of
its steps after the first ones, from update to update, in seconds and in seconds of CPU time, which
other programs on the machine disturb less. `gpt` has a quarter of its batch, so that a check weighs
four times as much.

A difference below the control's is not measurable like this. So a clock in the run's process also
times the functions of the checks, in a run that compares everything and repeats a micro-batch every
10 steps. What a function usually takes (its median) counts in every step. All above it, and
functions that few steps call, count once per interval, which is 1,000 steps by default. Its CPU
time leaves out what a rank waits for others.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HELPERS = ("tests/helpers", "tests")
CLOCKED = {
    "oneloop.checks.repeats": ("Checks",),
    "oneloop.checks.replicas": ("check_replicas",),
    "oneloop.machine.fsdp2_units": ("Units",),
    # of the checks before 2026-12-01
    "oneloop.machine.layout_checks": ("Checks", "Units"),
    "oneloop.machine.contents": ("Contents",),
    "oneloop.machine.replicas": ("check_replicas",),
    "oneloop.loop.repeat": ("Repeats",),
}
"""functions of the checks, and classes of which all public methods are timed, by module; a checkout
may lack some"""
SKIPPED = 20  # first steps, of which none counts
OFTEN = 10  # steps of an interval in the clocked run
RARELY = 1000  # steps of an interval by default
CLOCKED_STEPS = 200
STEPS = {"digits": 1000, "gpt": 45}
RECIPES = {
    "digits": ["digits"],
    "gpt": ["gpt", "--task.data", str(HERE.parent / "src" / "oneloop"), "--batch.size", "8"],
}
COMMON = [
    *("--eval.every", "0", "--save.every", "0", "--save.best", "false", "--save.final", "last"),
    *("--log.every", "20", "--track", "none", "--watch.output", "quiet", "--machine.workers", "0"),
]
VARIANTS = {
    "without": ["--machine.check_every", "0"],
    "with": [],
    "without again": ["--machine.check_every", "0"],
    "before": [],
}


# --- In the run's processes.
# -------------------------------------------------------------------------------------------


class Stopwatch:
    """Times the outermost calls of functions.

    Attributes:
        calls: name, begin, seconds, and seconds of CPU time of each call.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, float, float]] = []
        self._inside = False

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a clock around its outermost calls."""

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            if self._inside:
                return function(*given, **named)
            self._inside = True
            used = time.thread_time()
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                took = time.perf_counter() - began
                used = time.thread_time() - used
                self.calls.append((function.__qualname__, began, took, used))
                self._inside = False

        return call

    def watch(self, module: str, names: Sequence[str]) -> None:
        """Time these functions and classes of a module, wherever they were imported."""
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            return
        for name in names:
            item = getattr(found, name, None)
            if inspect.isclass(item):
                for key, function in list(vars(item).items()):
                    if inspect.isfunction(function) and not key.startswith("_"):
                        setattr(item, key, self.timed(function))
            elif item is not None:
                timed = self.timed(item)
                for other in [one for key, one in sys.modules.items() if key[:7] == "oneloop"]:
                    if getattr(other, name, None) is item:
                        setattr(other, name, timed)


def timed(words: list[str], clock: bool) -> dict[str, Any]:
    """Train, and return the times of the updates and of the calls of the checks."""
    import oneloop.train as module
    from oneloop.optim.bad_step_guard import Guard

    updates: list[tuple[float, float]] = []
    stopwatch = Stopwatch()
    ordinary = Guard.step

    def step(*given: Any, **named: Any) -> None:
        ordinary(*given, **named)
        updates.append((time.perf_counter(), time.process_time()))

    Guard.step = step
    if clock:
        for name, items in CLOCKED.items():
            stopwatch.watch(name, items)
    module.Run.end = lambda run, code: None
    module.main(words)
    return {"updates": updates, "calls": stopwatch.calls}


# --- In the benchmark's process.
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """A recipe on a number of processes."""

    recipe: str
    ranks: int
    more: tuple[str, ...] = ()
    """more words of the command line"""

    def words(self, variant: list[str], steps: int) -> list[str]:
        """Return the command line, except for the folder of the run."""
        duration = ["--duration", str(steps)]
        return [*RECIPES[self.recipe], *COMMON, *duration, *self.more, *variant]


class Server:
    """A process with the code of a checkout that forks the processes of runs, and stays alive."""

    CODE = (
        "import json, sys\n"
        "import worlds, cost_of_checks\n"
        "for line in sys.stdin:\n"
        "    words, ranks, clock = json.loads(line)\n"
        "    world = worlds.run(cost_of_checks.timed, words, clock, ranks=ranks)\n"
        "    print('RESULT' + json.dumps(world.ok()), flush=True)\n"
    )

    def __init__(self, checkout: Path) -> None:
        folders = [*(checkout / name for name in HELPERS), checkout / "src", HERE]
        path = os.pathsep.join(map(str, folders))
        self._process = subprocess.Popen(
            [sys.executable, "-c", self.CODE],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, setup: Setup, variant: list[str], steps: int, *, clock: bool = False
    ) -> list[dict[str, Any]]:
        """Train; return the times of each rank."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as scratch:
            words = [*setup.words(variant, steps), "--run.dir", f"{scratch}/run"]
            self._process.stdin.write(json.dumps([words, setup.ranks, clock]) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("RESULT"):
                    found: list[dict[str, Any]] = json.loads(line.removeprefix("RESULT"))
                    return found
        raise RuntimeError("the run failed; its output is above")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


KINDS = ("wall", "CPU")


def durations(times: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the microseconds of rank 0's steps that count: seconds, and those of CPU time."""
    later = times[0]["updates"][SKIPPED:]
    found = {}
    for number, kind in enumerate(KINDS):
        each = [after[number] - before[number] for before, after in pairwise(later)]
        found[kind] = [1e6 * one for one in each]
    return found


def pairs(setup: Setup, servers: dict[str, Server], steps: int, count: int) -> None:
    """Alternate the variants; print the steps of each, and how many times the first's they take."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    variants = [name for name in VARIANTS if name != "before" or name in servers]
    for number in range(count):
        for name in random.Random(number).sample(variants, len(variants)):
            server = servers["before" if name == "before" else "now"]
            times = server(setup, VARIANTS[name], steps)
            for kind, each in durations(times).items():
                found[name, kind].append(statistics.median(each))

    for kind in KINDS:
        for name in variants:
            values = found[name, kind]
            print(
                f"  {kind:4} {name:14} median {statistics.median(values):9.1f} us  min "
                f"{min(values):9.1f}  max {max(values):9.1f}   over without "
                f"{ratio(values, found['without', kind])}",
                flush=True,
            )
        if "before" in variants:
            over = ratio(found["with", kind], found["before", kind])
            print(f"  {kind:4} with, over before: {over}", flush=True)


def ratio(values: list[float], base: list[float]) -> str:
    """Return the median ratio of pairs, with the least and the most."""
    ratios = [one / other for one, other in zip(values, base, strict=True)]
    return f"{statistics.median(ratios):.3f}x ({min(ratios):.3f} to {max(ratios):.3f})"


def clocked(setup: Setup, server: Server, name: str) -> None:
    """Print what the functions of the checks take on rank 0."""
    often = ["--machine.check_every", str(OFTEN), "--log.every", str(OFTEN)]
    steps = min(SKIPPED + CLOCKED_STEPS, 2 * STEPS[setup.recipe])
    times = server(setup, often, steps, clock=True)[0]
    number = len(times["updates"]) - SKIPPED - 1
    usual = dict.fromkeys(KINDS, 0.0)
    rare = dict.fromkeys(KINDS, 0.0)
    for function, calls in spent(times).items():
        each = {}
        for kind, values in zip(KINDS, zip(*calls, strict=True), strict=True):
            # A function that few steps call counts as rare as a whole.
            middle = statistics.median(values) if 2 * len(calls) > number else 0.0
            usual[kind] += 1e6 * middle * len(calls) / number
            above = 1e6 * (sum(values) - middle * len(calls)) / (number / OFTEN)
            rare[kind] += above
            each[kind] = f"{1e6 * middle:7.1f} us, and {above:8.1f} us per interval"
        print(
            f"  clock, {name:6} {function:22} {len(calls) / number:6.2f} calls per step of "
            f"{each['wall']}   (CPU {each['CPU']})",
            flush=True,
        )
    for kind, values in durations([times]).items():
        step = statistics.median(values)
        total = usual[kind] + rare[kind] / RARELY
        print(
            f"  clock, {name:6} {kind:4} {usual[kind]:.1f} us in every step, {rare[kind]:.0f} us "
            f"per interval: with {RARELY:,} steps {total:.1f} us of {step:.0f} us, "
            f"{100 * total / step:.2f} % of a step",
            flush=True,
        )


def spent(times: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return for each function seconds and CPU seconds of its calls, in the steps that count."""
    begin = times["updates"][SKIPPED][0]
    end = times["updates"][-1][0]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, began, wall, used in times["calls"]:
        if begin <= began < end:
            found[name].append((wall, used))
    return dict(sorted(found.items()))


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--before", type=Path, help="another checkout")
    asked.add_argument("--recipe", choices=RECIPES, action="append")
    asked.add_argument("--ranks", type=int, action="append")
    asked.add_argument("--pairs", type=int, default=12)
    asked.add_argument("--steps", type=int, help="default: 1000 of digits, 45 of gpt")
    asked.add_argument("--more", default="", help='more words, such as "--batch.grain 4"')
    given = asked.parse_args()
    import torch

    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, "
        f"{os.cpu_count()} cores, 1 thread per process; {given.pairs} rounds",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as cache:
        os.environ["ONELOOP_CACHE"] = cache
        servers = {"now": Server(HERE.parent)}
        if given.before:
            servers["before"] = Server(given.before.resolve())
        for recipe in given.recipe or RECIPES:
            for ranks in given.ranks or (1, 2):
                setup = Setup(recipe, ranks, tuple(given.more.split()))
                steps = given.steps or STEPS[recipe]
                layout = "one process" if ranks == 1 else f"DDP on {ranks} processes"
                print(f"{recipe}, {layout}, {steps} steps {given.more}".rstrip(), flush=True)
                pairs(setup, servers, steps, given.pairs)
                for name, server in servers.items():
                    clocked(setup, server, name)
                print(flush=True)
        for server in servers.values():
            server.close()


if __name__ == "__main__":
    main()
