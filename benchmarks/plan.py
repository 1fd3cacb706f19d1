"""oneloop plan: predicted and measured bytes of every cell of the grid, and time and memory of
planning 7 B parameters.

    python benchmarks/plan.py > benchmarks/DATE-plan.txt

A cell is a recipe, a layout and a mode of recompute. Predicted: planned by one process. Measured:
the same ledger on real tensors of real processes (gloo). Needs two cores and about 15 minutes.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from adapters import a_base  # noqa: E402
from planning import GPT, LAYOUTS, one_step, planned_recipes  # noqa: E402
from worlds import run  # noqa: E402

MODES = ("none", "full", "selective", "every:2")
GRAIN, WIDE = (
    [*GPT[:-2], "--batch.grain", "2"],
    [*GPT, "--task.width", "256", "--task.block", "256"],
)


def grid() -> None:
    print(
        f"{'recipe':22}{'layout':8}{'recompute':11}{'predicted':>12}{'measured':>12}{'error':>9}{'evaluation':>12}"
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        known = planned_recipes(a_base(Path(scratch))) | {
            "gpt, batch.grain": GRAIN,
            "gpt, 256 wide": WIDE,
        }
        for name, words in known.items():
            for config, ranks in LAYOUTS.items():
                for mode in MODES[:1] if name == "digits" else MODES:
                    keys = [*words, *([] if mode == "none" else ["--machine.recompute", mode])]
                    plan = run(one_step, keys, ranks, config=config).ok()[0]
                    real = run(one_step, keys, ranks=ranks, config=config).ok()[0]
                    errors = [plan[part] / real[part] - 1 for part in ("peak", "evaluation")]
                    worst = max([worst, *map(abs, errors)])
                    sizes = f"{plan['peak']:12,}{real['peak']:12,}{errors[0]:9.3%}{errors[1]:12.3%}"
                    same = (
                        plan["collectives"] == real["collectives"]
                        and plan["operations"] == real["operations"]
                    )
                    print(
                        f"{name:22}{config:8}{mode:11}{sizes}" + ""
                        if same
                        else "  other calls or FLOPs",
                        flush=True,
                    )
    print(f"largest error: {worst:.3%}")


def seven_billion() -> None:
    number, root = 6_738_415_616, 32_000 * 4_096 + 4_096
    words = [
        "llama-7b",
        "--ema.half_life",
        "10%",
        "--config_file",
        "fsdp2",
        "--mixed_precision",
        "bf16",
        "--no_changes",
    ]
    for processes in (8, 64, 1024):
        command = [
            sys.executable,
            "-m",
            "oneloop",
            "plan",
            *words,
            "--processes",
            str(processes),
            "--json",
        ]
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ) as process:
            largest = 0
            while process.poll() is None:
                largest = max(largest, resident(process.pid))
                time.sleep(0.2)
            plan = json.loads(process.stdout.read())  # type: ignore[union-attr]
        seconds, held, times = (
            time.perf_counter() - began,
            plan["memory"]["kept"],
            plan["accumulate"],
        )
        sent = {}
        for call in plan["collectives"]:
            sent[call["name"]] = sent.get(call["name"], 0) + call["size"] * call["calls"]
        wanted = {
            "all-gather": times * (4 * (number - root) + 2 * root),
            "reduce-scatter": 4 * number,
        }
        print(
            f"{processes} processes: {seconds:.1f} s, at most {largest / 2**30:.2f} GiB in all "
            "processes of the command"
        )
        print(
            f"  total {plan['memory']['total'] / 2**30:.2f} GiB; "
            f"{plan['flops']['total'] / times / 1e12:.2f} TFLOP",
            end="",
        )
        print(
            f" per micro-batch; parameters x {held['parameters'] * processes / number / 4:.4f} "
            "of the formula",
            end="",
        )
        print(f", EMA x {held['EMA'] * processes / number / 4:.4f}", end="")
        print(f", optimizer x {held['optimizer'] * processes / number / 8:.4f}", end="")
        print(
            "".join(f", {name} x {sent[name] / size:.4f}" for name, size in wanted.items()),
            flush=True,
        )


def resident(parent: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    found = 0
    try:
        found += int(Path(f"/proc/{parent}/statm").read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    except (OSError, IndexError):
        return found
    return found + sum(resident(int(child)) for child in children)


if __name__ == "__main__":
    names = ("torch", "accelerate", "transformers", "oneloop")
    print(
        f"{date.today()}: python {sys.version.split()[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
    )
    print(f"command: python benchmarks/plan.py; {os.cpu_count()} cores, no GPU\n")
    seven_billion()
    print()
    grid()
