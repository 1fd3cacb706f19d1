"""More lines of part check of ``gpu_day.py``: preferences, teachers, masked tokens, answers.

PYTHONPATH=src python benchmarks/gpu_day.py --part check --only deterministic_preference
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gpu_check import DETERMINISTIC, deterministic, loss_falls, texts, trained
from gpu_lines import Place, Result, line
from same_bits_gpu import environment

SIZES = {"layers": 2, "width": 64, "heads": 4}


def pairs(folder: Path) -> str:
    """Write pairs of a better and a worse answer, and return their file."""
    import preference_rows

    return preference_rows.write(folder / "pairs.jsonl", preference_rows.rows(200))


def stored(store: Path) -> dict[str, bytes]:
    """Return the files of a store of frozen outputs."""
    return {str(file.relative_to(store)): file.read_bytes() for file in store.glob("*/*.bin")}


@line("check", seconds=12, numbers=["steps"])
def deterministic_bert(place: Place) -> Result:
    return deterministic(place, "bert", layers=1, width=64, data=texts(place.folder))


@line("check", seconds=20, numbers=["ranges"], packages=["datasets"])
def deterministic_preference(place: Place) -> Result:
    """The pass over the reference and the training are bit-identical in two runs."""
    found = []
    for number in range(2):
        store = place.folder / f"store-{number}"
        hashed = trained(
            place.folder / f"run-{number}",
            "preference",
            steps=4,
            precision=place.precision,
            machine=DETERMINISTIC,
            task={**SIZES, "data": pairs(place.folder), "store": str(store)},
            batch={"size": 8},
        )
        found.append((hashed, stored(store)))
    assert found[0][1], "no frozen outputs were stored"
    assert found[0][1] == found[1][1], "the stored log-probabilities differ"
    assert found[0][0] == found[1][0], "the weights differ"
    return Result("two passes and two runs are bit-identical", {"ranges": len(found[0][1])})


@line("check", seconds=25, numbers=["steps"])
def deterministic_distil(place: Place) -> Result:
    from adapters import a_base

    teacher = a_base(place.folder / "teacher")
    return deterministic(place, "distil", teacher=str(teacher), top_k=8, length=96, **SIZES)


@line("check", seconds=20, numbers=["largest_difference", "records"], packages=["datasets"])
def log_probabilities_of_gpu_and_cpu(place: Place) -> Result:
    """A store may be used on another device, so its float32 values must be those of a CPU."""
    found = []
    for device in ("cpu", place.device.type):
        store = place.folder / f"store-of-{len(found)}"
        words = ["preference", "--task.data", pairs(place.folder), "--task.store", str(store)]
        words += ["--machine.device", device, "--duration", "1", "--eval.every", "0"]
        words += ["--save.every", "0", "--track", "none", "--watch.output", "quiet"]
        for key, value in SIZES.items():
            words += [f"--task.{key}", str(value)]
        run = place.folder / f"run-of-{len(found)}"
        command = [sys.executable, "-m", "oneloop.train", *words, "--run.dir", str(run)]
        subprocess.run(command, check=True, env=environment())
        found.append(stored(store))
    assert found[0].keys() == found[1].keys(), "a GPU and a CPU have stores with other keys"

    # a file has its records, and a checksum of 16 bytes
    values = []
    for files in found:
        contents = [files[name][:-16] for name in sorted(files)]
        records = [np.frombuffer(content, dtype="<f8") for content in contents]
        values.append(np.concatenate(records))
    apart = float(np.abs(values[0] - values[1]).max())
    assert apart < 1e-2, apart
    says = f"{len(values[0])} records within {apart:.1e}"
    return Result(says, {"largest_difference": apart, "records": len(values[0])})


@line("check", seconds=12, numbers=["last_loss"], packages=["datasets"])
def reward_in_bf16(place: Place) -> Result:
    """A reward head, whose metrics are sums in float64 on the device."""
    recipe = place.folder / "reward.yaml"
    task: dict[str, Any] = {"name": "reward", "data": pairs(place.folder), "length": 48, **SIZES}
    recipe.write_text(json.dumps({"task": {**task, "held_out": 0.2}}))
    evaluated = {"every": 20, "samples": 4}
    return loss_falls(place.folder / "run", place.precision, str(recipe), eval=evaluated)


@line("check", seconds=25, numbers=["answers"])
def deterministic_numbers(place: Place) -> Result:
    """Two runs that generate answers in their evaluations have the same metrics and weights."""
    found = []
    for number in range(2):
        folder = place.folder / f"run-{number}"
        weights = trained(
            folder,
            "numbers",
            steps=20,
            precision=place.precision,
            machine=DETERMINISTIC,
            ema={"half_life": 200},
            task={"layers": 1, "width": 64},
            eval={"every": 10, "generate": 16, "samples": 2},
        )
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").open()]
        found.append((weights, [evaluation(one) for one in lines if "eval/loss" in one]))
    assert found[0][1] == found[1][1], "the metrics differ"
    assert found[0][0] == found[1][0], "the weights differ"
    assert any("eval/exact_match" in one for one in found[0][1]), found[0]
    return Result("answers and weights of two runs are equal", {"answers": 16})


def evaluation(logged: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of an evaluation, without its times."""
    return {name: value for name, value in logged.items() if "eval/" in name and "sec" not in name}
