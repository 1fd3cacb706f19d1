"""Pairs of answers, a small base model, and the task ``preference``, whose forwards of a frozen
model are counted in files."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from adapters import a_base
from oneloop.tasks.preference import Preference
from worlds import apply, here, run

LAYOUTS = {"single": 1, "ddp": 2, "fsdp2": 2}
GOOD = ["one", "two", "three", "four", "five", "six"]
BAD = ["seven", "eight", "monday", "friday", "may", "june"]


class Counted(Preference):
    """Each process lists the documents of the pass in the folder $PAIRS_LOG."""

    def _documents(self, name: str, documents: Any) -> Any:
        log = os.environ.get("PAIRS_LOG")
        if log:
            with Path(log, f"{os.getpid()}").open("a") as file:
                file.write("".join(f"{name} {document}\n" for document in documents))
        return super()._documents(name, documents)


def listed(folder: Path) -> list[str]:
    """Return set and number of each document that a pass has computed, and forget them."""
    found = []
    for file in (folder / "log").iterdir():
        found += file.read_text().splitlines()
        file.unlink()
    return found


def rows(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs of answers of different lengths."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        good = draw.choice(GOOD)
        bad = draw.choice(BAD)
        question = " ".join(draw.choices(GOOD + BAD, k=draw.randint(1, 3)))
        answers = ([good] * draw.randint(1, 4), [bad] * draw.randint(1, 5))
        texts = [" ".join(words) for words in answers]
        made.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": texts[0]}],
                "rejected": [{"role": "assistant", "content": texts[1]}],
            }
        )
    return made


def lay(folder: Path) -> Path:
    """Write the data and the base model.

    The norms of a Llama are computed in float32, which would round also in a float64 run.
    """
    a_base(folder / "base", kind="GPTNeoX")
    (folder / "data").mkdir()
    for name, count, seed in (("train", 60, 0), ("validation", 9, 1)):
        write(folder / "data" / f"{name}.jsonl", rows(count, seed=seed))
    write(folder / "new.jsonl", rows(7, seed=2))
    return folder


def write(file: Path, made: list[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in made))


def words(base: Path, *more: str) -> list[str]:
    """Return the words of a run on these data, in float64."""
    return [
        "recipe.yaml",
        *("--task.model", str(base / "base")),
        *("--task.data", str(base / "data")),
        *("--task.length", "96"),
        *("--batch.size", "4"),
        *("--duration", "8"),
        *("--optimizer.name", "sgd"),
        *("--optimizer.lr", "0.05"),
        *("--optimizer.clip", "0"),
        *("--optimizer.weight_decay", "0"),
        *("--schedule.name", "constant"),
        *("--schedule.warmup", "0"),
        *("--log.every", "1"),
        *("--eval.every", "0"),
        *("--save.every", "4"),
        *("--track", "none"),
        *("--machine.workers", "0"),
        *("--machine.dtype", "float64"),
        *("--run.dir", "run"),
        *more,
    ]


def trained(folder: Path, given: list[str], layout: str = "single") -> Any:
    """Run these words in a folder, which counts the forwards."""
    (folder / "log").mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text("task: counted_pairs.Counted\n")
    variables = {"OMP_NUM_THREADS": "1", "PAIRS_LOG": str(folder / "log")}
    ranks = LAYOUTS[layout]
    return run(here, given, ranks=ranks, config=layout, folder=folder, variables=variables)


def applied(folder: Path, layout: str, *given: str) -> Any:
    """Run ``oneloop evaluate`` or ``predict`` in a folder."""
    variables = {"OMP_NUM_THREADS": "1", "PAIRS_LOG": str(folder / "log")}
    ranks = LAYOUTS[layout]
    return run(apply, [*given], ranks=ranks, config=layout, folder=folder, variables=variables)


def logged(folder: Path) -> list[dict[str, float]]:
    """Return the logged metrics of each step of a run."""
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "train/loss" in line]


def bins(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.glob("*/*.bin")}
