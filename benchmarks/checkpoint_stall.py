"""Measure how long a save blocks training (goal C5), how it slows the steps while it is written,
and start-up at any position (C6).

    python benchmarks/checkpoint_stall.py --mib 256

One process on a CPU. After a warm-up all variants alternate (A B C … A B C …). The control compares
a warm copy of the same state with itself. `blocked` is the time in which the training loop waits.
`step` is the median step time during the write, divided by that of steps without a write.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.state_dict import model_tensors
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order
from oneloop.data.step_batches import CollateWithWeight, groups


def state(mib: int) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], float]]:
    """Return a model whose weights and AdamW state total ``mib`` MiB, its optimizer, and a timed
    step."""
    width = int((mib * 2**20 / 12 / 4) ** 0.5)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(64, width)

    def step() -> float:
        began = time.perf_counter()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - began

    return model, optimizer, step


def position_cost(position: int) -> float:
    """Return the seconds until the first batch at this position."""
    began = time.perf_counter()
    collate = CollateWithWeight(lambda xs: {"x": torch.tensor(xs)}, lambda batch: batch["x"].sum())
    stream = groups(
        range(10**6),
        collate,
        Order(10**6, seed=0),
        BatchLayout(64, 1),
        rank=0,
        seed=0,
        start=position,
        device=torch.device("cpu"),
    )
    next(iter(next(stream).batches))
    return time.perf_counter() - began


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--mib", type=int, default=256)
    asked.add_argument("--rounds", type=int, default=6)
    given = asked.parse_args()
    root = Path(tempfile.mkdtemp(prefix="stall-"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)  # the other core writes the checkpoint
    model, optimizer, step = state(given.mib)
    step()
    accelerator = Accelerator(cpu=True, project_dir=str(root))
    prepared = accelerator.prepare(model), accelerator.prepare(optimizer)
    assert prepared
    tensors = list((model_tensors(model) | optimizer_tensors(model, optimizer)).values())
    room = [torch.empty_like(tensor) for tensor in tensors]
    ours = Checkpoints(root / "ours", accelerator)
    number = 0
    waiting: list[object] = []

    def warm_copy() -> None:
        torch._foreach_copy_(room, tensors)

    def our_save() -> None:
        ours.save(number, model, optimizer, {})

    def dcp_state() -> dict[str, object]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def dcp_save() -> None:
        dcp.save(dcp_state(), checkpoint_id=str(root / f"dcp-{number}"))

    def dcp_async(kind: AsyncCheckpointerType) -> Callable[[], None]:
        def save() -> None:
            waiting.append(
                dcp.async_save(
                    dcp_state(),
                    checkpoint_id=str(root / f"{kind.name}-{number}"),
                    async_checkpointer_type=kind,
                )
            )

        return save

    def accelerate_save() -> None:
        accelerator.save_state(str(root / f"accelerate-{number}"))

    def finished() -> None:
        ours.finish()
        for future in waiting:
            future.result()  # type: ignore[attr-defined]
        waiting.clear()

    ways: dict[str, Callable[[], None]] = {
        "a warm copy of the state": warm_copy,
        "the same again (control)": warm_copy,
        "oneloop": our_save,
        "dcp.save": dcp_save,
        "dcp.async_save, thread": dcp_async(AsyncCheckpointerType.THREAD),
        "dcp.async_save, process": dcp_async(AsyncCheckpointerType.PROCESS),
        "accelerator.save_state": accelerate_save,
    }
    blocked: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(given.rounds + 1):  # round 0 is the warm-up
        for name, save in ways.items():
            number += 1
            quiet = statistics.median(step() for _ in range(5))
            began = time.perf_counter()
            save()
            took = time.perf_counter() - began
            during = statistics.median(step() for _ in range(5))
            finished()
            if turn:
                blocked[name].append(took)
                steps[name].append(during / quiet)
            for path in root.iterdir():
                if path.name != "ours":
                    shutil.rmtree(path)
    ours.close()
    copy = statistics.median(blocked["a warm copy of the state"])
    print(f"# {date.today()}  {' '.join(['python', *sys.argv])}")
    size = sum(t.numel() * t.element_size() for t in tensors) / 2**20
    print(
        f"# torch {torch.__version__}, Python {platform.python_version()}, "
        f"{platform.processor() or platform.machine()}"
        f", {torch.get_num_threads()} thread; state {size:.0f} MiB, {given.rounds} rounds"
    )
    print(f"{'way':28} {'blocked s':>10} {'min':>8} {'max':>8} {'x copy':>8} {'step, x quiet':>14}")
    for name in ways:
        times = blocked[name]
        print(
            f"{name:28} {statistics.median(times):10.4f} {min(times):8.4f} {max(times):8.4f}"
            f" {statistics.median(times) / copy:8.2f} {statistics.median(steps[name]):14.2f}"
        )
    position_cost(0)
    near, far = (statistics.median(position_cost(at) for _ in range(20)) for at in (0, 64 * 10**6))
    print(
        f"start to first batch: {near * 1e3:.2f} ms at position 0, {far * 1e3:.2f} ms at batch "
        f"10^6 ({far / near:.2f}x)"
    )
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
