"""Measure the preflight check: time to the end of the first step with it and without it,
compared with a step.

    python benchmarks/trial_cost.py --pairs 6

Each run is a separate process, forked from a warm server (tests/helpers/worlds.py), so imports are
not included; runs with and without alternate. `--against ../before` also measures the check of
another checkout.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = {
    "digits": ["digits"],
    "gpt": ["gpt", "--task.data", str(HERE.parent / "src")],
    "snippets": ["snippets"],
}
STEPS = 12


def timed(words: list[str], kind: str) -> tuple[float, float]:
    """Return the seconds of the preflight check and step 1, and the median of the later steps."""
    import time

    import oneloop.train as module
    from oneloop.job.preflight_result import Preflight
    from oneloop.optim.bad_step_guard import Guard

    marks: list[float] = []
    took = [0.0]
    ordinary = Guard.step

    def step(*given, **named):
        ordinary(*given, **named)
        marks.append(time.perf_counter())

    Guard.step = step
    trying = module.preflight

    def preflight(*given):
        began = time.perf_counter()
        result = Preflight(flops=1.0) if kind == "untried" else trying(*given)
        took[0] += time.perf_counter() - began
        return result

    module.preflight = preflight
    groups = module.Steps.__iter__

    def steps(*given):
        marks.append(time.perf_counter())
        yield from groups(*given)

    module.Steps.__iter__ = steps
    module.Run.end = lambda run, code: None
    module.main(words)
    later = [after - before for before, after in pairwise(marks[2:])]
    return took[0] + marks[1] - marks[0], statistics.median(later)


def measure(checkout: Path, kind: str, words: list[str]) -> tuple[float, float]:
    code = (
        "import sys; sys.path[:0] = "
        f"{[*(str(checkout / name) for name in ('tests/helpers', 'tests')), str(HERE)]!r}\n"
        f"import worlds, trial_cost\n"
        f"print(*worlds.run(trial_cost.timed, {words!r}, {kind!r}).ok()[0])"
    )
    env = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}:{HERE}"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    ).stdout
    first, step = map(float, out.split()[-2:])
    return first, step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=[*RECIPES])
    given = parser.parse_args()
    import torch

    print(f"python benchmarks/trial_cost.py --pairs {given.pairs}, {date.today()}")
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, {platform.machine()}, "
        f"{os.cpu_count()} cores"
    )
    print(
        "seconds to the end of step 1 (median, least to most); cost: with less without, pair "
        "by pair\n"
    )
    kinds = ["tried", "untried", *(["before"] if given.against else [])]
    for name in given.recipes:
        recipe = RECIPES[name]
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(given.pairs):
            for kind in kinds:
                checkout = given.against.resolve() if kind == "before" else HERE.parent
                with tempfile.TemporaryDirectory() as scratch:
                    more = ["--duration", str(STEPS), "--eval.every", "0", "--save.every", "0"]
                    words = [
                        *recipe,
                        *more,
                        "--save.best",
                        "false",
                        "--run.dir",
                        f"{scratch}/run",
                        "--track",
                        "none",
                        "--watch.output",
                        "quiet",
                    ]
                    found[kind].append(measure(checkout, kind, words))
        step = statistics.median(step for _, step in found["tried"])
        for kind in kinds:
            firsts = [first for first, _ in found[kind]]
            print(
                f"{name:9} {kind:8} {statistics.median(firsts):.3f} ({min(firsts):.3f} to "
                f"{max(firsts):.3f})"
            )
        print(f"{name:9} a step   {step:.3f}")
        for kind in kinds:
            if kind == "untried":
                continue
            pairs = zip(found[kind], found["untried"], strict=True)
            costs = [with_ - without for (with_, _), (without, _) in pairs]
            cost = statistics.median(costs)
            span = f"({min(costs):.3f} to {max(costs):.3f}), {cost / step:.2f} steps"
            print(f"{name:9} cost of {kind}: {cost:.3f} {span}")
        print()


if __name__ == "__main__":
    main()
