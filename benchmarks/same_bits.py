"""Measure the cost of `batch.grain`: step time, memory and bytes sent, with it and without, by one
micro-batch.

    python benchmarks/same_bits.py --rounds 5

One process, DDP on two and FSDP2 on two, one thread per process. Runs with and without alternate,
and each round ends with another run without (control). A step has eight leaves. Under FSDP2 there
is also `machine.sync_each_batch`, which sends as often. Times are those of the log lines after the
first. Bytes are what a rank sends per step if collectives are rings: the profiler counts them over
ten more steps. Runs are forked from a warm server (worlds.py).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMMON = [
    "--eval.every",
    "0",
    "--save.every",
    "0",
    "--track",
    "none",
    "--machine.workers",
    "0",
    "--watch.output",
    "quiet",
]
RECIPES = {
    "digits, 98 K": (8, ["digits", "--task.dropout", "0.1"]),
    "gpt, 0.8 M": (
        2,
        [
            "gpt",
            "--task.data",
            str(HERE.parent / "src"),
            "--batch.size",
            "16",
            "--eval.micro",
            "null",
        ],
    ),
}
WORLDS = {"one process": (1, "single"), "DDP, 2": (2, "ddp"), "FSDP2, 2": (2, "fsdp2")}
SENT = {
    "alltoall_base_": 1.0,
    "_allgather_base_": 1.0,
    "_reduce_scatter_base_": 1.0,
    "allreduce_": 2.0,
}
"""times a tensor is sent by a ring, but for a rank's own part"""


def sent(words: list[str], ranks: int) -> float:
    """Return the bytes that one rank sends in a whole run. Gathers and scatters count their larger
    tensor. DDP's own gradient all-reduces have no shapes in a profile."""
    from torch.profiler import ProfilerActivity, profile

    from oneloop import train

    train.Run.end = lambda self, code: None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        train.main(words)
    total: Counter[str] = Counter()
    for event in profiled.events():
        name = event.name.removeprefix("c10d::")
        if event.name.startswith("c10d::") and name in SENT:
            total[name] += SENT[name] * 4 * max(map(numel, event.input_shapes), default=0)
    if ranks > 1 and not total:
        values = words[words.index("--run.dir") + 1] + "/final/model.safetensors"
        total["allreduce_"] = (
            int(words[words.index("--duration") + 1]) * 2 * os.path.getsize(values)
        )
    return sum(total.values()) * (ranks - 1) / ranks


def numel(shape: list) -> int:
    """Return the number of elements of a shape, or of a list of shapes."""
    if shape and isinstance(shape[0], list):
        return sum(map(numel, shape))
    return math.prod(shape) if shape else 0


def metrics(folder: Path) -> tuple[float, float]:
    """Return the milliseconds of a step, and the peak MiB of a process."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line for line in lines if "train/samples_per_second" in line][1:]
    size = logged[1]["samples"] - logged[0]["samples"]
    steps = logged[1]["step"] - logged[0]["step"]
    each = statistics.median(
        size / steps / line["train/samples_per_second"] * 1e3 for line in logged
    )
    return each, max(line["memory/peak_gib"] for line in logged) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", help="the beginning of a recipe's name")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(HERE.parent / "tests" / "helpers"), str(HERE.parent / "src")]
    import torch

    from worlds import run, train

    print(f"# {date.today()}  python {' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {os.cpu_count()} cores"
    )
    print(
        "# medians over rounds of a step's ms (least to most), and against 'without' of the "
        "same round; MiB; KiB sent"
    )

    def trained(words: list[str], ranks: int, config: str, steps: int, function=train, *more):
        with tempfile.TemporaryDirectory() as scratch:
            every = ["--duration", str(steps), "--log.every", "10", "--run.dir", f"{scratch}/run"]
            done = run(
                function,
                [*words, *COMMON, *every],
                *more,
                ranks=ranks,
                config=config,
                timeout=900.0,
            ).ok()
            return metrics(Path(scratch, "run")) if function is train else done[0]

    for recipe, (grain, words) in RECIPES.items():
        if not recipe.startswith(args.only or ""):
            continue
        for world, (ranks, config) in WORLDS.items():
            kinds = {
                "without": ["--batch.micro", str(grain)],
                "batch.grain": ["--batch.grain", str(grain)],
            }
            if config == "fsdp2":
                kinds["sync_each_batch"] = [*kinds["without"], "--machine.sync_each_batch", "true"]
            kinds["without again"] = kinds["without"]
            found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for _ in range(args.rounds):
                for kind, more in kinds.items():
                    found[kind].append(trained([*words, *more], ranks, config, args.steps))
            for kind, more in kinds.items():
                times = [each for each, _ in found[kind]]
                ratios = [
                    a / b for (a, _), (b, _) in zip(found[kind], found["without"], strict=True)
                ]
                memory = statistics.median(peak for _, peak in found[kind])
                counts = [
                    trained([*words, *more], ranks, config, steps, sent, ranks)
                    for steps in (10, 20)
                ]
                print(
                    f"{recipe:14} {world:12} {kind:16} {statistics.median(times):7.1f} "
                    f"({min(times):.1f} to"
                    f" {max(times):.1f}) ms  {statistics.median(ratios):5.2f}x "
                    f"({min(ratios):.2f} to {max(ratios):.2f})"
                    f"  {memory:6.0f} MiB  {(counts[1] - counts[0]) / 10 / 1024:9.1f} KiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
