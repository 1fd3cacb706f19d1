"""Measure an EMA update relative to one ``torch._foreach_lerp_`` of the same tensors (goal C4).

    python benchmarks/ema_update.py

The shapes of a GPT-2 with 12 blocks (148 tensors). Rounds alternate: the bare lerp, EMA.update, the
bare lerp again (control), and for comparison the usual loop over ``mul_().add_()``.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from oneloop.ema import EMA, EMASettings


def timed(act: Callable[[], object], times: int, device: torch.device) -> float:
    """Return microseconds per call."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        act()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - began) / times * 1e6


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--width", type=int, default=384)
    asked.add_argument("--times", type=int, default=20)
    asked.add_argument("--pairs", type=int, default=10)
    given = asked.parse_args()
    torch.set_num_threads(1)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    shape = GPT2Config(
        n_embd=given.width, n_layer=12, n_head=6, vocab_size=4096, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(shape).to(device)
    ema = EMA(model, EMASettings(half_life=10_000.0))
    weights = [parameter.detach() for parameter in model.parameters()]
    bare: list[Tensor] = [weight.clone() for weight in weights]
    looped: list[Tensor] = [weight.clone() for weight in weights]

    def loop() -> None:
        for mine, theirs in zip(looped, weights, strict=True):
            mine.mul_(0.999).add_(theirs, alpha=0.001)

    acts: dict[str, Callable[[], object]] = {
        "one _foreach_lerp_": lambda: torch._foreach_lerp_(bare, weights, 0.001),
        "EMA.update": lambda: ema.update(64),
        "one _foreach_lerp_ (control)": lambda: torch._foreach_lerp_(bare, weights, 0.001),
        "loop of mul_().add_()": loop,
    }
    found: dict[str, list[float]] = {name: [] for name in acts}
    for turn in range(given.pairs + 1):
        for name, act in acts.items():
            took = timed(act, given.times, device)
            if turn:
                found[name].append(took)
    number = sum(weight.numel() for weight in weights)
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {device}, "
        f"{len(weights)} tensors, {number:,}"
        f" parameters; microseconds per update, {given.pairs} rounds of {given.times}"
    )
    base = found["one _foreach_lerp_"]
    for name, times in found.items():
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        middle, low, high = statistics.median(times), min(times), max(times)
        print(f"{name:30} median {middle:9.1f}   min {low:9.1f}   max {high:9.1f}   {ratio:.3f}x")


if __name__ == "__main__":
    main()
