"""Compare two checkouts bit by bit: weights, EMA weights, optimizer, metrics, events and sample
ids.

    git worktree add ../before COMMIT
    python benchmarks/same_as_before.py ../before .

Use it for a change that must not change results. Runs the packaged `digits` and a small `gpt` on
one process, DDP and FSDP2: without faults, and with two bad steps under the policies stop, skip and
rewind. Times, speeds and memory are not compared. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

from safetensors import deserialize

HERE = Path(__file__).parent
BATCH, STEPS = 16, 24
NEWER = ("noise_scale", "final", "checksum")
"""entries of summary.json that are words, or that older checkouts do not write"""
COMMON = [
    *(
        "--batch.size",
        str(BATCH),
        "--batch.micro",
        "4",
        "--duration",
        str(STEPS),
        "--log.every",
        "4",
        "--eval.every",
        "8",
    ),
    *(
        "--save.every",
        "5",
        "--save.keep",
        "99",
        "--schedule.name",
        "cosine",
        "--schedule.warmup",
        "3",
    ),
    *("--ema.half_life", "100 samples", "--track", "none"),
]
RECIPES = {
    "digits": ["--task", "same_as_before_tasks.Digits"],
    "gpt": [
        *("--task", "same_as_before_tasks.GPT", "--task.data", str(Path("texts").resolve())),
        *("--task.width", "32", "--task.layers", "2", "--task.heads", "2", "--task.block", "32"),
    ],
}
STRATEGIES = {"single": 1, "ddp": 2, "fsdp2": 2}
POLICIES = ("none bad", "stop", "skip", "rewind")
TIMED = (
    "train/noise_scale",  # an estimate, of which the last bits are not promised
    "train/update_ratio",  # another one, of a sample of the weights
    "time",
    "seconds",
    "goodput",
    "checksum",
    "train/samples_per_second",
    "speed/",
    "share/",
    "memory/",
    "device/",
)


def write_texts(folder: Path) -> None:
    """Write the source of asyncio in folders that name the splits, so that no rule draws them."""
    for number, file in enumerate(sorted(Path(asyncio.__file__).parent.glob("*.py"))):
        split = folder / {0: "validation", 1: "test"}.get(number % 10, "train")
        split.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, split / f"{file.stem}.txt")


def timeless(line: dict[str, Any]) -> dict[str, Any]:
    """Return the values that depend on the recipe only."""
    return {name: value for name, value in line.items() if not name.startswith(TIMED)}


def drawn(folder: Path, rank: int) -> list[list[int]]:
    """Return the sample ids of each micro-batch that a rank trained on."""
    return [json.loads(line) for line in (folder / f"ids-{rank}.jsonl").read_text().splitlines()]


def left(folder: Path, ranks: int, code: Any) -> dict[str, Any]:
    """Return all results of a run, except times."""
    files = [
        *(folder / "run" / "final").glob("*.safetensors"),
        *(folder / "run").glob("checkpoints/*/*.safetensors"),
    ]
    lines = []
    for text in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        # Other programs on the machine may slow down a rank.
        if line.get("event") != "straggler":
            lines.append(timeless(line))
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return {
        "exit code": code,
        **{str(file.relative_to(folder)): hash_of(file) for file in sorted(files)},
        **{f"ids of rank {rank}": drawn(folder, rank) for rank in range(ranks)},
        **{f"metrics {number}": line for number, line in enumerate(lines)},
        "summary": {k: v for k, v in timeless(summary).items() if k not in NEWER},
    }


def hash_of(file: Path) -> str:
    """Return a hash of the tensors in a safetensors file, by name.

    Buffers of each rank are left out: which of them a checkpoint holds depends on the version. So
    does whether it holds the state of an optimizer, all zeros, before the first step.
    """
    found = hashlib.sha256()
    for name, entry in sorted(deserialize(file.read_bytes())):
        if not name.startswith("rank.") and any(entry["data"]):
            found.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
            found.update(entry["data"])
    return found.hexdigest()


def take(checkout: Path, to: Path) -> None:
    """Run every case with the code of ``checkout``, and write the results of each."""
    sys.path[:0] = [str(checkout / "tests" / "helpers"), str(checkout / "tests"), str(HERE)]
    import worlds

    assert str(checkout.resolve()) in worlds.__file__
    found = {}
    for recipe, words in RECIPES.items():
        for strategy, ranks in STRATEGIES.items():
            bad = ""
            for policy in POLICIES:
                with tempfile.TemporaryDirectory() as scratch:
                    folder = Path(scratch)
                    more = [] if policy == "none bad" else ["--guard.nonfinite", policy]
                    argv = [recipe, *words, *COMMON, *more, "--run.dir", str(folder / "run")]
                    world = worlds.run(
                        worlds.train,
                        argv,
                        ranks=ranks,
                        config=strategy,
                        variables={
                            "SAME_FOLDER": scratch,
                            "SAME_BAD": bad,
                            "PYTHONPATH": str(HERE),
                        },
                        timeout=600,
                    )
                    if not (folder / "run" / "summary.json").exists():
                        raise RuntimeError(f"{recipe}, {strategy}, {policy}: {world.output}")
                    found[f"{recipe}, {strategy}, {policy}"] = left(folder, ranks, world.codes)
                    # one bad sample at a step without other events, one at a step that logs
                    if policy == "none bad":
                        micros = drawn(folder, 0)
                        each = len(micros) // STEPS
                        bad = ",".join(str(micros[(step - 1) * each][0]) for step in (7, 12))
                print(
                    f"{recipe}, {strategy}, {policy}: codes {world.codes}",
                    file=sys.stderr,
                    flush=True,
                )
    to.write_text(json.dumps(found))


def known(value: Any, before: Any) -> Any:
    """Return ``value`` without the metrics that the older checkout does not write."""
    if not isinstance(value, dict) or not isinstance(before, dict):
        return value
    return {name: inner for name, inner in value.items() if name in before}


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    for case in before:
        a, b = before[case], after[case]
        b = {name: known(value, a.get(name)) for name, value in b.items()}
        names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
        counted = (
            f"{len(a)} things, {sum(name.endswith('.safetensors') for name in a)} of them files"
        )
        yield f"{case:28} {counted}: {'the same' if not names else f'{len(names)} differ'}"
        for name in names:
            yield f"    {name}: {a.get(name)!s:.400} -> {b.get(name)!s:.400}"


def reported(results: list[dict[str, Any]], script: str, steps: int) -> int:
    """Print how two checkouts differ; return the exit code."""
    import torch

    lines = list(differences(*results))
    print(f"# {date.today()}  python benchmarks/{script} BEFORE AFTER")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.machine()}, {steps} steps each"
    )
    print("\n".join(lines))
    return int(any("differ" in line for line in lines))


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("checkouts", nargs=2, type=Path)
    asked.add_argument("--take", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.take:
        take(*given.checkouts)
        return 0
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        write_texts(Path(scratch) / "texts")
        for number, checkout in enumerate(given.checkouts):
            to = Path(scratch) / f"{number}.json"
            # each checkout is run by its own script: modules have moved
            own = checkout.resolve() / "benchmarks"
            path = os.pathsep.join([str(checkout.resolve() / "src"), str(own)])
            command = [
                sys.executable,
                str(own / Path(__file__).name),
                "--take",
                str(checkout.resolve()),
                str(to),
            ]
            subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, cwd=scratch)
            results.append(json.loads(to.read_text()))
    return reported(results, Path(__file__).name, STEPS)


if __name__ == "__main__":
    sys.exit(main())
