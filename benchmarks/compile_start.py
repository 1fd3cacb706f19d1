"""Measure the time to the first step of a compiled model, by block and whole, and the cost of
recompute.

    python benchmarks/compile_start.py --layers 12

Each cold start is a separate process with an empty compiler cache. Then one process without compile
measures step time and saved activations under each kind of activation (gradient) checkpointing,
alternating.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date

import torch
from torch import Tensor, nn

from oneloop.machine.compile import compile_
from oneloop.machine.recompute import recompute
from oneloop.tasks.causal_lm import CausalLM


def transformer(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return CausalLM(data=__file__, layers=layers, width=192, heads=6, block=128).model()


def step(model: nn.Module) -> Tensor:
    tokens = torch.randint(0, 257, (8, 128), generator=torch.Generator().manual_seed(1)).to(
        next(model.parameters()).device
    )
    loss: Tensor = model(input_ids=tokens, use_cache=False).logits.square().mean()
    loss.backward()
    return loss


def device() -> torch.device:
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def timed(model: nn.Module) -> float:
    began = time.perf_counter()
    step(model).item()
    return time.perf_counter() - began


def cold(scope: str, layers: int) -> None:
    """Print the seconds of the first step and of the fastest of five later ones, in a separate
    process."""
    model = transformer(layers).to(device())
    compile_(model, scope)
    first = timed(model)
    print(first, min(timed(model) for _ in range(5)))


def kept(model: nn.Module) -> int:
    """Return the bytes that autograd saves for one step, without the block inputs that recompute
    itself keeps."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}
    alive: list[object] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model)
    return sum(found.values())


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--layers", type=int, default=12)
    asked.add_argument("--cold", choices=["none", "regional", "whole"])
    asked.add_argument("--starts", type=int, default=2)
    asked.add_argument("--rounds", type=int, default=8)
    given = asked.parse_args()
    if given.cold:
        cold(given.cold, given.layers)
        return
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {device()}"
        f", {torch.get_num_threads()} threads, GPT-2 of {given.layers} blocks, width 192, 8 x "
        "128 tokens"
    )
    for scope in ("none", "whole", "regional"):
        found = []
        for _ in range(given.starts):
            with tempfile.TemporaryDirectory() as cache:
                ran = subprocess.run(
                    [sys.executable, __file__, "--cold", scope, "--layers", str(given.layers)],
                    capture_output=True,
                    text=True,
                    check=True,
                    env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
                )
            found.append([float(word) for word in ran.stdout.split()[-2:]])
        print(
            f"compile {scope:9} first step {', '.join(f'{first:.1f}' for first, _ in found)} s;"
            f" later {min(later for _, later in found) * 1e3:.0f} ms"
        )
    modes = ["none", "full", "every:2", "selective", "none (control)"]
    models = {mode: transformer(given.layers).to(device()) for mode in modes}
    for mode, model in models.items():
        recompute(model, mode.split(" ")[0])
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(given.rounds + 1):
        for mode, model in models.items():
            took = timed(model)
            if turn:
                times[mode].append(took)
    for mode, model in models.items():
        ratio = statistics.median(a / b for a, b in zip(times[mode], times["none"], strict=True))
        print(
            f"recompute {mode:16} step median {statistics.median(times[mode]) * 1e3:6.0f} ms   "
            f"{ratio:.2f}x   kept"
            f" {kept(model) / 2**20:7.1f} MiB"
        )


if __name__ == "__main__":
    main()
