"""Measure the loss of a large vocabulary: memory beyond its inputs, time, and its distance from
float64.

    python benchmarks/loss_memory.py [--device cuda] [--types float32 bfloat16] [--rounds 3]

Loss and backward to hidden states and weight, each in a separate process: F.linear with
F.cross_entropy (plain), torch's F.linear_cross_entropy (torch 2.15), and oneloop's
chunked_cross_entropy with several chunk sizes. The variants alternate; the plain one runs again as
control. Memory is the peak of the process (VmHWM, or CUDA's peak allocation) above its memory with
the inputs and after one small loss. It includes the gradients.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from oneloop.tasks.language.chunked_loss import chunked_cross_entropy

Way = Callable[[Tensor, Tensor, Tensor], Tensor]
LEFT_OUT = -100


def plain(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, target, reduction="sum", ignore_index=LEFT_OUT)


def torchs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(
        hidden, weight, target, reduction="sum", ignore_index=LEFT_OUT, options=options
    )


def chunked(power: int) -> Way:
    return lambda hidden, weight, target: (
        chunked_cross_entropy(hidden, weight, target, entries=1 << power).total
    )


def ways(less: int = 0) -> dict[str, Way]:
    """Return the variants by name; each chunk has 2^less times fewer logits than the name says."""
    chunks = {f"chunked 2^{power}": chunked(power - less) for power in (22, 24, 26)}
    return {"plain": plain, "torch": torchs, **chunks, "plain (control)": plain}


WAYS = ways()


def inputs(
    given: argparse.Namespace, dtype: torch.dtype, tokens: int, entries: int
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, given.width, generator=draw).to(given.device, dtype)
    weight = (torch.randn(entries, given.width, generator=draw).mul_(given.width**-0.5)).to(
        given.device, dtype
    )
    target = torch.randint(0, entries, (tokens,), generator=draw).to(given.device)
    return hidden.requires_grad_(), weight.requires_grad_(), target


def held(device: str) -> tuple[int, int]:
    """Return the bytes held now, and the peak since the start or the last reset."""
    if device != "cpu":
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


def reset(device: str) -> None:
    gc.collect()
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def measured(given: argparse.Namespace) -> dict[str, float]:
    """Measure one variant in this process: a small loss first, then the peak memory of one, then
    the time of one."""
    torch.set_num_threads(given.threads)
    way, dtype = WAYS[given.way], getattr(torch, given.types[0])
    small = inputs(given, dtype, 8, 64)
    way(*small).backward()
    hidden, weight, target = inputs(given, dtype, given.tokens, given.entries)
    reset(given.device)
    before, _ = held(given.device)
    seconds = []
    for turn in range(given.times + 1):
        hidden.grad = weight.grad = None
        began = time.perf_counter()
        way(hidden, weight, target).backward()
        if given.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        if not turn:
            most = held(given.device)[1] - before
    return {"megabytes": most / 2**20, "seconds": statistics.median(seconds[1:] or seconds)}


def distances(given: argparse.Namespace, dtype: torch.dtype) -> None:
    """Print the distance of loss and gradients from float64, at 1/16 of tokens and vocabulary with
    as many chunks."""
    hidden, weight, target = inputs(given, dtype, given.tokens // 16, given.entries // 16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    true = plain(*exact, target)
    slopes = torch.autograd.grad(true, exact)
    for name in given.ways:
        if "control" in name:
            continue
        loss = ways(less=8)[name](hidden, weight, target)
        mine = torch.autograd.grad(loss, (hidden, weight))
        relative = abs(float(loss.detach().double() - true.detach()) / float(true.detach()))
        off = [
            float((found.double() - expected).abs().max() / expected.abs().max())
            for found, expected in zip(mine, slopes, strict=True)
        ]
        kept = str(loss.dtype).removeprefix("torch.")
        print(
            f"{name:16} loss {relative:.1e} ({kept})   gradient of hidden {off[0]:.1e}, of "
            f"weight {off[1]:.1e}"
        )


def alternated(given: argparse.Namespace, kind: str) -> None:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in given.ways}
    asked = [
        "--device",
        given.device,
        "--types",
        kind,
        "--threads",
        given.threads,
        "--times",
        given.times,
    ]
    asked += ["--tokens", given.tokens, "--entries", given.entries, "--width", given.width]
    # Return large blocks to the system as soon as they are freed, so that memory in use is memory
    # needed.
    surroundings = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "MALLOC_TRIM_THRESHOLD_": "1048576",
    }
    for _ in range(given.rounds):
        for name in given.ways:
            command = [sys.executable, __file__, "--way", name, *map(str, asked)]
            ran = subprocess.run(
                command, check=True, capture_output=True, text=True, env=surroundings
            )
            found[name].append(json.loads(ran.stdout.splitlines()[-1]))
    base = found[given.ways[0]]
    for name, rounds in found.items():
        memory, seconds = ([one[key] for one in rounds] for key in ("megabytes", "seconds"))
        ratio = statistics.median(
            one["seconds"] / other["seconds"] for one, other in zip(rounds, base, strict=True)
        )
        print(
            f"{name:16} memory {statistics.median(memory):8,.0f} MB ({min(memory):,.0f} to "
            f"{max(memory):,.0f})"
            f"   time {statistics.median(seconds):7.3f} s ({min(seconds):.3f} to "
            f"{max(seconds):.3f})  {ratio:.2f}x",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--types", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--entries", type=int, default=131_072)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3, help="0: only the distances")
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        help="timed losses of each process, after one that is not; 0: it",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these, plain first"
    )
    parser.add_argument("--way", choices=WAYS, help="measure this one here, and print JSON")
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measured(given)))
        return
    print(f"# {date.today()}  {shlex.join(['python', *sys.argv])}")
    where = (
        torch.cuda.get_device_name() if given.device != "cpu" else f"cpu, {os.cpu_count()} cores"
    )
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, {where}, "
        f"{given.threads} thread(s)"
    )
    print(
        f"# {given.tokens:,} tokens, {given.entries:,} entries, width {given.width:,}; "
        f"{given.rounds} rounds"
    )
    for kind in given.types:
        size = torch.finfo(getattr(torch, kind)).bits // 8
        logits, weight = given.tokens * given.entries, given.entries * given.width * size
        print(
            f"\n{kind}: all logits are {logits * size / 2**20:,.0f} MB, the weight "
            f"{weight / 2**20:,.0f} MB"
        )
        if given.rounds:
            alternated(given, kind)
    for kind in given.types:
        print(
            f"\n{kind}, distance from float64 at {given.tokens // 16} tokens and "
            f"{given.entries // 16:,} entries"
        )
        distances(given, getattr(torch, kind))


if __name__ == "__main__":
    main()
