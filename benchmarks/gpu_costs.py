"""Costs that are not those of a step's model: update, saves and starts (part speed of
``gpu_day.py``)."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu_lines import Place, Result, line
from gpu_loops import by_hand, by_oneloop
from gpu_pacer import SKIPPED
from gpu_speed import gpt2_workload, seconds_of
from gpu_trace import PHASES, Reduced, events_of, reduce
from gpu_turns import BY_HAND, OURS, WARMED, Arm, contender, slug
from oneloop.basics.side_copies import before_change
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.store import Keep
from oneloop.ema import EMA, EMASettings
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.clip import clip_, global_norm
from oneloop.optim.optimizers import adamw, build
from same_bits_gpu import environment

BYTES_PER_PARAMETER = 44  # norm 4, clip 8 or less, AdamW 28, EMA 12: read and written, float32


@line(
    "speed",
    seconds=40,
    numbers=["small_ms", "large_ms", "small_share_of_floor", "large_share_of_floor"],
    on_gpu=["small_kernels", "large_kernels"],
)
def update(place: Place) -> Result:
    """Time clip, AdamW and EMA, without a model, beside the bytes that they must move (G8)."""
    sizes = {"small": (12, 768, 50_304), "large": (16, 2_048, 128_256)}
    if place.toy:
        sizes = {"small": (2, 32, 64), "large": (2, 64, 64)}
    numbers: dict[str, float] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, (layers, width, vocabulary) in sizes.items():
        model = nn.ModuleList([nn.Embedding(vocabulary, width)])
        for _ in range(layers):
            model.append(nn.Linear(width, 12 * width, bias=False))
            model.append(nn.LayerNorm(width))
        model.to(place.device)
        seconds, trace = _timed_update(model, place)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        floor = BYTES_PER_PARAMETER * parameters / (place.rates["copy_gb_per_second"] * 1e9)
        numbers[f"{name}_parameters"] = float(parameters)
        numbers[f"{name}_with_host_ms"] = 1e3 * seconds
        if not place.toy:  # a run has more work queued, which hides the time of the host
            seconds = sum(row["ms per step"] for row in trace.tables[PHASES]) / 1e3
            numbers[f"{name}_kernels"] = trace.kernels
        numbers[f"{name}_ms"] = 1e3 * seconds
        numbers[f"{name}_share_of_floor"] = seconds / floor
        if not place.toy:
            tables |= {f"{name}: {title}": rows for title, rows in trace.tables.items() if rows}
        del model
    says = ", ".join(
        f"{numbers[f'{name}_parameters'] / 1e6:,.0f} M parameters in {numbers[f'{name}_ms']:.2f} "
        f"ms, {numbers[f'{name}_share_of_floor']:.2f} x the floor"
        for name in sizes
    )
    return Result(says, numbers, tables)


def _timed_update(model: nn.Module, place: Place) -> tuple[float, Reduced]:
    """Return the seconds of an update of random gradients, and its trace."""
    parameters = list(model.parameters())
    optimizer = build(adamw, model, lr=1e-4, weight_decay=0.1)
    guard = Guard(optimizer, device=place.device)
    ema = EMA(model, EMASettings(decay=0.999))
    gradients: list[Tensor] = [torch.randn_like(parameter) for parameter in parameters]

    def updated() -> None:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = gradient
        norm = global_norm(parameters)
        clip_(parameters, 1.0, norm)
        guard.step(norm)
        ema.update(1)
        guard.resolve()

    took = seconds_of(updated, place.device, 3 if place.toy else 20)
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if not place.toy:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        updated()
    return took, reduce(events_of(profiler), steps=1)


@line("speed", seconds=15, numbers=["small_stall_ms", "small_call_ms"])
def checkpoint_stall(place: Place) -> Result:
    """Time what training loses by a save of 1.5 GB."""
    return save_stall(place, "small", 1e6 if place.toy else 1.5e9)


@line("speed", name="checkpoint-stall-large", seconds=70, numbers=["large_stall_ms"])
def checkpoint_stall_large(place: Place) -> Result:
    """Time what training loses by a save of 14.8 GB."""
    return save_stall(place, "large", 4e6 if place.toy else 14.8e9)


def save_stall(place: Place, name: str, size: float) -> Result:
    """Time what training loses by a save.

    It is the time of the call and of the step after it, without the median time of a step.

    Args:
        place: where the line runs.
        name: prefix of the numbers.
        size: bytes of the weights and the state of AdamW.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=place.toy, project_dir=str(place.folder))
    width = int((size / 12 / 8) ** 0.5)
    layers = [nn.Linear(width, width, bias=False, device=place.device) for _ in range(8)]
    model = accelerator.prepare(nn.Sequential(*layers))
    stalls = _stalls(model, width, Checkpoints(place.folder / name, accelerator), place)
    gigabytes = 12 * 8 * width**2 / 1e9
    says = (
        f"{gigabytes:.1f} GB: {stalls['stall_ms']:.1f} ms, of which the call "
        f"{stalls['call_ms']:.1f} ms (the first save {stalls['first_stall_ms']:.0f} ms; steps of "
        f"{stalls['step_ms']:.0f} ms)"
    )
    numbers = {f"{name}_{key}": value for key, value in stalls.items()}
    return Result(says, {f"{name}_gb": gigabytes, **numbers})


def _stalls(
    model: nn.Module, width: int, checkpoints: Checkpoints, place: Place
) -> dict[str, float]:
    """Train, save a few times, and return the milliseconds that training loses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(64 if place.toy else 2048, width, device=place.device)
    state = RunState(model, optimizer, parts={})
    checkpoints.overlaps = True

    def seconds_of_step() -> float:
        began = time.perf_counter()
        model(inputs).square().mean().backward()
        before_change()
        optimizer.step()
        optimizer.zero_grad()
        if not place.toy:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    # Warm up. As in a run, the memory of saves is made while the first steps train.
    seconds_of_step()
    if not place.toy:
        checkpoints.prepare(lambda: state.bytes_of_rank(checkpoints))
    steps = [seconds_of_step() for _ in range(5 if place.toy else 40)]
    usual = statistics.median(steps)

    # Save.
    calls = []
    stalls = []
    keep = Keep(newest=1)  # the disk need not hold all of them
    for step in range(1, 4):
        began = time.perf_counter()
        state.save(checkpoints, step, keep=keep)
        calls.append(time.perf_counter() - began)
        stalls.append(calls[-1] + seconds_of_step() - usual)
        checkpoints.poll()
        problem = checkpoints.finish()
        if problem is not None:
            raise RuntimeError(problem)
    checkpoints.close()
    return {
        "step_ms": 1e3 * usual,
        "longest_early_step_ms": 1e3 * max(steps),
        "first_stall_ms": 1e3 * stalls[0],
        "call_ms": 1e3 * statistics.median(calls[1:]),
        "stall_ms": 1e3 * statistics.median(stalls[1:]),
    }


STARTS = (
    Arm(BY_HAND, by_hand),
    Arm("by hand, again", by_hand, kernels_of=BY_HAND),
    Arm(OURS, by_oneloop),
    Arm("oneloop, again", by_oneloop, kernels_of=OURS),
)


@line("speed", name="first-steps", seconds=100, numbers=["by_hand", "oneloop", "oneloop_again"])
def first_steps(place: Place) -> Result:
    """Time the start of each loop alone, with no compiled kernels and with those of its first
    start."""
    workload = gpt2_workload(place)
    numbers: dict[str, float] = {}
    for arm in STARTS:
        one = contender(arm, workload, place)
        try:
            numbers[slug(arm.name)] = one.ask("last", WARMED)["since_start"]
        finally:
            one.stop()
    steps = SKIPPED + WARMED
    return Result(
        f"GPT-2, {steps} steps from the start of a process with imported libraries: by hand "
        f"{numbers['by_hand']:.1f} s, and {numbers['by_hand_again']:.1f} s with the kernels of "
        f"that start; oneloop {numbers['oneloop']:.1f} and {numbers['oneloop_again']:.1f} s",
        numbers,
    )


@line("speed", seconds=60, numbers=["seconds", "seconds_again"])
def time_to_first_step(place: Place) -> Result:
    """Time a command until its first step is logged, twice: the second finds warm files."""
    words = ["gpt", "--duration", "2", "--log.every", "1", "--eval.every", "0", "--track", "none"]
    if place.toy:
        words += ["--task.width", "32", "--task.layers", "1", "--task.heads", "2"]
    times = []
    for number in range(2):
        folder = place.folder / f"run-{number}"
        options = ["--config_file", "single", "--mixed_precision", place.precision]
        command = [sys.executable, "-m", "oneloop", "launch", *options, *words]
        began = time.perf_counter()
        with subprocess.Popen([*command, "--run.dir", str(folder)], env=environment()) as process:
            while process.poll() is None and not _has_lines(folder / "metrics.jsonl"):
                time.sleep(0.01)
            times.append(time.perf_counter() - began)
            process.wait()
        if process.returncode:
            raise RuntimeError(f"the run ended with exit code {process.returncode}")
    return Result(
        f"{times[0]:.1f} s, then {times[1]:.1f} s, from the command to the first log of gpt",
        {"seconds": times[0], "seconds_again": times[1]},
    )


def _has_lines(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0
