"""Real runs with ``batch.grain``, and their results that must be bit-identical on every layout: all
except times and estimates."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from worlds import run, timeless_log, train

SPLITS = ((1, "single"), (2, "ddp"), (2, "fsdp2"), (4, "ddp"), (4, "fsdp2"))
"""(ranks, config)"""
ESTIMATES = ("train/noise_scale", "train/update_ratio")
"""which may differ between layouts"""


def digest(folder: Path) -> dict[str, str]:
    """Return sha256 by tensor of the newest checkpoint and of ``final/``, and of the log without
    times and estimates."""
    found = {}
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    for place in (newest, folder / "final"):
        for name, value in _tensors(place).items():
            found[f"{place.name if place.name == 'final' else 'state'}:{name}"] = value
    for number, line in enumerate(exact_log(folder)):
        found[f"line {number}"] = json.dumps(line, sort_keys=True)
    return found


def exact_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that are equal on each layout, without estimates."""
    lines = timeless_log(folder)
    for line in lines:
        for name in ESTIMATES:
            line.pop(name, None)
    return lines


def _tensors(folder: Path) -> dict[str, str]:
    """Return sha256 of each full tensor, assembled from the shards of a checkpoint."""
    pieces: dict[str, list[tuple[tuple[int, ...], bytes]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            places = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118
                at = tuple(places.get(name, {}).get("saved_offsets", ()))
                pieces.setdefault(name, []).append((at, opened.get_tensor(name).numpy().tobytes()))
    return {
        name: hashlib.sha256(b"".join(raw for _, raw in sorted(each))).hexdigest()
        for name, each in pieces.items()
    }


def trained(
    place: Path, words: list[str], *, ranks: int, config: str, options=(), function=train, **more
) -> dict:
    """Return the digest of a run with these command-line words on these processes."""
    place.mkdir(parents=True, exist_ok=True)
    more = {"timeout": 600.0} | more
    run(
        function,
        [*words, "--run.dir", str(place / "run")],
        ranks=ranks,
        config=config,
        options=options,
        **more,
    ).ok()
    return digest(place / "run")


def different(one: dict, other: dict) -> list[str]:
    """Return the names of the items that differ."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def mortal(words: list[str], step: int, delay: float) -> None:
    """Run ``train`` and kill it ``delay`` seconds after this step was logged."""
    import os
    import signal
    import threading
    import time

    log = Path(words[words.index("--run.dir") + 1], "metrics.jsonl")

    def watch() -> None:
        while True:
            time.sleep(0.005)
            try:
                logged = [
                    json.loads(line).get("step", 0)
                    for line in log.read_text().splitlines()
                    if "bits" in line
                ]
            except (OSError, ValueError):
                continue
            if logged and logged[-1] >= step:
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    train(words)


def history(
    folder: Path, words: list[str], deaths: list[tuple[int, str, int]], last: tuple[int, str], draw
) -> int:
    """Kill a run at these steps, each on a new layout, and end it on the last one; return the
    number of kills."""
    folder.mkdir(parents=True, exist_ok=True)
    words, killed = [*words, "--run.dir", str(folder / "run")], 0
    for ranks, config, step in deaths:
        world = run(
            mortal, words, step, draw.uniform(0.0, 0.1), ranks=ranks, config=config, timeout=300.0
        )
        assert set(world.codes) <= {-9, 0, 1}, world.output  # 1: another rank died first
        killed += -9 in world.codes
    ranks, config = last
    run(train, words, ranks=ranks, config=config, timeout=300.0).ok()
    return killed
