"""Runs of the tasks of silent_values.py, and what they leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from oneloop.basics.seeds import key
from worlds import World, fresh, run
from zoo_outcomes import COMMON


def trained(
    place: Path,
    task: str,
    *words: str,
    ranks: int = 1,
    config: str = "single",
    variables: dict[str, str] | None = None,
    function: Callable[[list[str]], None] = fresh,
) -> World:
    """Train a task by ``function`` in the folder ``place``; its run is in ``place / "run"``."""
    place.mkdir(exist_ok=True)
    (place / "recipe.yaml").write_text(f"task: {task}\n")
    given = [str(place / "recipe.yaml"), *COMMON, *words, "--run.dir", str(place / "run")]
    return run(function, given, ranks=ranks, config=config, variables=variables, timeout=90.0)


def final(place: Path) -> dict[str, torch.Tensor]:
    return load_file(place / "run" / "final" / "model.safetensors")


def metrics(place: Path) -> list[dict[str, Any]]:
    lines = (place / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(place: Path) -> list[float]:
    return [line["train/loss"] for line in metrics(place) if "train/loss" in line]


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not bit-identical in both."""
    names = one.keys() | other.keys()
    both = one.keys() & other.keys()
    return sorted(names - {name for name in both if torch.equal(one[name], other[name])})


def plain_sgd(task: Any, steps: list[list[int]], *, samples: int = 16) -> dict[str, torch.Tensor]:
    """Return the weights of a loop of plain PyTorch over these indices of each step."""
    torch.manual_seed(key(0))
    model = task.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = task.train_set()
    for indices in steps:
        batch = task.collate([data[index] for index in indices])
        batch = {n: v.double() if v.is_floating_point() else v for n, v in batch.items()}
        optimizer.zero_grad()
        (task.loss(model, batch)[0] / samples).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}
