"""Part speed of ``gpu_day.py``: oneloop beside the best hand-written loop.

The rates of this card come first, since floors are computed from them. Then each workload runs by
hand and with oneloop, compiled, in turns (A B B A A B, and A again as a control). Ratios are those
of one round; their median is reported. Lines named "-others" time more loops, once each: the
Trainer, and both loops without compile.
"""

from __future__ import annotations

import re
import shutil
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpu_lines import Place, Result, line
from gpu_loops import (
    LOG_EVERY,
    Contender,
    Images,
    Loop,
    Setting,
    Text,
    Workload,
    by_hand,
    by_oneloop,
    by_oneloop_with_logits,
    by_trainer,
)
from gpu_trace import Reduced, events_of, reduce
from oneloop.basics.side_copies import before_change
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.retention import Keep
from oneloop.ema import EMA
from oneloop.measure.flops import data_sheet
from oneloop.optim.bad_step_guard import Guard
from oneloop.optim.clip import clip_, global_norm
from oneloop.optim.optimizers import adamw, build
from same_bits_gpu import environment

ROUNDS = 3
CONTROL = 0.03  # a control further from 1 makes the line void
WAITED = 3 * LOG_EVERY  # steps in which host waits are counted
TRACED = LOG_EVERY  # steps of a trace: it has exactly one log step if they are not slow
PHASES = "time of the device by phase"  # table of a trace
SLOW = 0.1  # seconds of a step above which these are fewer steps
RESERVE = 60.0  # seconds that must be left to start another loop
BYTES_PER_PARAMETER = 44  # norm 4, clip 8 or less, AdamW 28, EMA 12: read and written, float32
PUBLIC = {  # units per second on one H100, and where the number is from
    "gpt2": (475_000.0, "llm.c"),
    "llama-1b": (45_500.0, "MPT-1B"),
    "lora-8b": (12_473.0, "NeMo AutoModel"),
    "vit-s16": (8_003.0, "timm"),
    "resnet50": (2_470.0, "NVIDIA, on an A100"),
}
FAR = 0.9  # a hand-written loop below this share of the public number must be explained first


def seconds_of(call: Any, device: torch.device, times: int) -> float:
    """Return the shortest of ``times`` runs of ``call``, with the device idle before and after."""
    shortest = float("inf")
    for _ in range(times + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        shortest = min(shortest, time.perf_counter() - began)
    return shortest


@line("speed", seconds=15, numbers=["matmul_tflops", "copy_gb_per_second"])
def card(place: Place) -> Result:
    """Measure bf16 products of random matrices, and copies counted as read and written."""
    device = place.device
    side = 512 if place.toy else 8192
    one, other = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(one)
    took = seconds_of(lambda: torch.mm(one, other, out=out), device, 5 if place.toy else 30)
    matmul = 2.0 * side**3 / took / 1e12

    source = torch.randn((1 << 20) if place.toy else (1 << 30), device=device)
    target = torch.empty_like(source)
    took = seconds_of(lambda: target.copy_(source), device, 5 if place.toy else 20)
    copied = 2.0 * source.numel() * source.element_size() / took / 1e9
    says = f"{matmul:,.1f} TFLOP/s in bf16 products of {side}, {copied:,.0f} GB/s copied"
    return Result(says, {"matmul_tflops": matmul, "copy_gb_per_second": copied})


def peak_tflops(place: Place) -> float:
    """Return the data sheet's TFLOP/s in bf16; of an unknown device, the measured rate."""
    peaks = {} if place.toy else data_sheet(torch.cuda.get_device_name())
    if torch.bfloat16 in peaks:
        return peaks[torch.bfloat16] / 1e12
    return place.rates["matmul_tflops"]


class Other(NamedTuple):
    """A loop that runs once."""

    name: str
    loop: Loop
    compiled: bool


def beside(workload: Workload, place: Place, *, steps: int) -> Result:
    """Run a workload by hand and with oneloop in turns."""
    if "matmul_tflops" not in place.rates:
        raise RuntimeError("speed/card gave no rates, which all numbers are compared with")
    rounds = 1 if place.toy else ROUNDS
    pairs: dict[str, list[float]] = {"by hand": [], "oneloop": []}
    traces: dict[str, Reduced] = {}
    starts: dict[str, float] = {}
    memory: dict[str, float] = {}
    compiled = not place.toy
    with ExitStack() as running:
        # Start and warm up both at the same time, each with its own compiled kernels.
        loops: dict[str, Contender] = {}
        for name, loop in {"by hand": by_hand, "oneloop": by_oneloop}.items():
            loops[name] = contender(loop, workload, place, compiled, name)
            running.callback(loops[name].stop)
            loops[name].request("time", 2)
        for name, one in loops.items():
            starts[name] = one.answer()["since_start"]

        # Time them in turns, each first in every second round, and the hand-written one again.
        for number in range(rounds):
            order = list(loops) if number % 2 == 0 else list(reversed(loops))
            for name in order:
                answer = loops[name].ask("time", steps)
                pairs[name].append(answer["seconds"] / steps)
                memory[name] = answer.get("allocated", 0.0) / 2**30
        again = loops["by hand"].ask("time", steps)["seconds"] / steps

        # Look into a few steps, and count the host's waits.
        waited, traced = (WAITED, TRACED)
        if place.toy:
            waited, traced = (4, 2)
        elif statistics.median(pairs["oneloop"]) > SLOW:
            waited, traced = (WAITED // 4, TRACED // 2)
        for name, one in loops.items():
            traces[name] = one.ask("trace", traced)
        waits = {name: one.ask("waits", waited) for name, one in loops.items()}
        hosts = {name: one.ask("host", traced) for name, one in loops.items()}

    result = summed_up(workload, place, pairs, again, traces, waits, starts, memory)
    for name, rows in hosts.items():
        result.tables[f"{name}: time of the host"] = rows
    return result


def once_each(workload: Workload, place: Place, *, steps: int, others: list[Other]) -> Result:
    """Time other loops once each. A failure of one is noted, and does not fail the line."""
    plain = [
        Other("by hand, compile off", by_hand, False),
        Other("oneloop, compile off", by_oneloop, False),
    ]
    answers: list[tuple[str, Any]] = []
    for name, loop, wanted in [*others, *plain]:
        if time.monotonic() > place.until - RESERVE:
            answers.append((name, "no time was left"))
            continue
        one = contender(loop, workload, place, wanted and not place.toy, name)
        try:
            answers.append((name, one.ask("last", steps)))
        except RuntimeError as error:
            answers.append((name, str(error)))
        finally:
            one.stop()

    # Only now ask CUDA about the device: no process that is forked later could use CUDA.
    rows: list[dict[str, Any]] = []
    for name, answer in answers:
        if isinstance(answer, str):
            rows.append({"loop": name, "failed": answer[:160]})
        else:
            rows.append(row(name, answer["seconds"] / steps, workload, place, answer))
    timed = [one for one in rows if "failed" not in one]
    rate = f"{workload.unit} per second"
    says = "; ".join(f"{one['loop']}: {one[rate]:,.0f} {workload.unit}/s" for one in timed)
    return Result(says or "no loop ran", {"loops": float(len(timed))}, {"loops": rows})


def contender(loop: Loop, workload: Workload, place: Place, compiled: bool, name: str) -> Contender:
    folder = place.folder / re.sub(r"\W+", "-", name)
    return Contender(loop, Setting(workload, place.device, place.precision, compiled, folder))


def row(
    name: str, seconds: float, workload: Workload, place: Place, answer: dict[str, float]
) -> dict[str, Any]:
    """Return a row of the table of loops; ``seconds`` are those of a step."""
    rate = workload.per_step / seconds
    tflops = rate * workload.flops_per_unit / 1e12
    return {
        "loop": name,
        f"{workload.unit} per second": rate,
        "ms per step": 1e3 * seconds,
        "TFLOP/s": tflops,
        "MFU": tflops / peak_tflops(place),
        "share of the measured matmul rate": tflops / place.rates["matmul_tflops"],
        "allocated GiB": answer.get("allocated", 0.0) / 2**30,
        "reserved GiB": answer.get("reserved", 0.0) / 2**30,
    }


def summed_up(
    workload: Workload,
    place: Place,
    pairs: dict[str, list[float]],
    again: float,
    traces: dict[str, Reduced],
    waits: dict[str, dict[str, float]],
    starts: dict[str, float],
    memory: dict[str, float],
) -> Result:
    """Return the numbers and tables of a workload."""
    ratios = [hand / ours for hand, ours in zip(pairs["by hand"], pairs["oneloop"])]
    ratio = statistics.median(ratios)
    control = again / statistics.median(pairs["by hand"])
    rates = {name: workload.per_step / statistics.median(times) for name, times in pairs.items()}
    tflops = rates["oneloop"] * workload.flops_per_unit / 1e12
    ours = traces["oneloop"]
    numbers = {
        f"{workload.unit}_per_second": rates["oneloop"],
        f"by_hand_{workload.unit}_per_second": rates["by hand"],
        "ratio_to_by_hand": ratio,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "control": control,
        "mfu": tflops / peak_tflops(place),
        "share_of_matmul_rate": tflops / place.rates["matmul_tflops"],
        "flops_per_unit": workload.flops_per_unit,
        "peak_gib": memory["oneloop"],
        "by_hand_peak_gib": memory["by hand"],
        "idle_share": ours.idle_share,
        "by_hand_idle_share": traces["by hand"].idle_share,
        "kernels_per_step": ours.kernels,
        "kernels_outside": ours.kernels_outside,
        "by_hand_kernels_outside": traces["by hand"].kernels_outside,
        "waits_in_trace_per_step": ours.waits,
        "host_waits": float(waits["oneloop"]["waits"]),
        "by_hand_host_waits": float(waits["by hand"]["waits"]),
        "host_waits_in_steps": float(waits["oneloop"]["steps"]),
        "logs_in_these_steps": float(waits["oneloop"]["steps"] // LOG_EVERY),
        "seconds_to_first_steps": starts["oneloop"],
        "by_hand_seconds_to_first_steps": starts["by hand"],
    }
    if place.toy:  # without a device there is nothing to trace, and memory is not measured
        numbers = {name: value for name, value in numbers.items() if value == value}
    tables = {"loops": [_pair_row(name, pairs, workload, place, memory) for name in pairs]}
    for name, trace in traces.items():
        tables |= {f"{name}: {title}": rows for title, rows in trace.tables.items() if rows}

    public, source = PUBLIC[workload.name]
    numbers["by_hand_share_of_public"] = rates["by hand"] / public
    says = (
        f"{rates['oneloop']:,.0f} {workload.unit}/s, {ratio:.3f} x by hand "
        f"({min(ratios):.3f} to {max(ratios):.3f}; control {control:.3f}); "
        f"attention counted as full, {100 * numbers['mfu']:.1f} % MFU"
    )
    if abs(control - 1) > CONTROL and not place.toy:
        says += "; VOID, since the control is not within 3 %"
    if rates["by hand"] < FAR * public and not place.toy:
        share = rates["by hand"] / public
        says += f"; by hand reaches {share:.2f} of {source}'s {public:,.0f}: explain this first"
    return Result(says, numbers, tables)


def _pair_row(
    name: str,
    pairs: dict[str, list[float]],
    workload: Workload,
    place: Place,
    memory: dict[str, float],
) -> dict[str, Any]:
    answer = {"allocated": memory[name] * 2**30}
    return row(name, statistics.median(pairs[name]), workload, place, answer)


NUMBERS = ["ratio_to_by_hand", "control", "mfu", "share_of_matmul_rate", "host_waits"]
ON_GPU = ["idle_share", "kernels_outside", "peak_gib", "waits_in_trace_per_step"]
SMALL_TEXT = {"layers": 2, "heads": 2, "width": 32, "vocabulary": 256, "length": 32, "rows": 2}


def gpt2_workload(place: Place) -> Workload:
    """GPT-2 of 124 M parameters, rows of 1,024 tokens."""
    if place.toy:
        return Text("gpt2", "gpt2", **SMALL_TEXT, texts=40)
    return Text(
        "gpt2",
        "gpt2",
        layers=12,
        heads=12,
        width=768,
        vocabulary=50_304,
        length=1_024,
        rows=32,
    )


@line(
    "speed",
    name="gpt2",
    seconds=180,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=ON_GPU,
)
def gpt2(place: Place) -> Result:
    return beside(gpt2_workload(place), place, steps=4 if place.toy else 40)


@line("speed", name="gpt2-others", seconds=200, numbers=["loops"])
def gpt2_others(place: Place) -> Result:
    others = [
        Other("oneloop, logits in memory", by_oneloop_with_logits, True),
        Other("transformers' Trainer (a dense mask)", by_trainer, True),
    ]
    steps = 4 if place.toy else 40
    return once_each(gpt2_workload(place), place, steps=steps, others=others)


def llama_1b_workload(place: Place) -> Workload:
    """The shape of Llama 3.2 1B, rows of 2,048 tokens."""
    if place.toy:
        return Text("llama-1b", "llama", **SMALL_TEXT, kv_heads=1, texts=40)
    return Text(
        "llama-1b",
        "llama",
        layers=16,
        heads=32,
        kv_heads=8,
        width=2_048,
        mlp=8_192,
        vocabulary=128_256,
        length=2_048,
        rows=4,
    )


@line(
    "speed",
    name="llama-1b",
    seconds=200,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=ON_GPU,
)
def llama_1b(place: Place) -> Result:
    return beside(llama_1b_workload(place), place, steps=4 if place.toy else 20)


@line("speed", name="llama-1b-others", seconds=220, numbers=["loops"])
def llama_1b_others(place: Place) -> Result:
    others = [
        Other("oneloop, logits in memory", by_oneloop_with_logits, True),
        Other("transformers' Trainer (a dense mask)", by_trainer, True),
    ]
    steps = 4 if place.toy else 20
    return once_each(llama_1b_workload(place), place, steps=steps, others=others)


def lora_8b_workload(place: Place) -> Workload:
    """Adapters on the shape of Llama 3 8B in bf16, packed rows of 4,096 tokens."""
    if place.toy:
        return Text(
            "lora-8b",
            "llama",
            **{**SMALL_TEXT, "rows": 1},
            kv_heads=1,
            tied=False,
            packed=True,
            lora=True,
            texts=40,
        )
    return Text(
        "lora-8b",
        "llama",
        layers=32,
        heads=32,
        kv_heads=8,
        width=4_096,
        mlp=14_336,
        vocabulary=128_256,
        length=4_096,
        rows=1,
        tied=False,
        packed=True,
        lora=True,
        compile="regional",
    )


@line(
    "speed",
    name="lora-8b",
    seconds=120,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=ON_GPU,
    packages=["peft"],
)
def lora_8b(place: Place) -> Result:
    return beside(lora_8b_workload(place), place, steps=2 if place.toy else 20)


@line("speed", name="lora-8b-others", seconds=240, numbers=["loops"], packages=["peft"])
def lora_8b_others(place: Place) -> Result:
    others = [
        Other("oneloop, logits in memory", by_oneloop_with_logits, True),
        Other("transformers' Trainer, without borders, compile off", by_trainer, False),
    ]
    steps = 2 if place.toy else 20
    return once_each(lora_8b_workload(place), place, steps=steps, others=others)


def vit_s16_workload(place: Place) -> Workload:
    """ViT-S/16 at 224 pixels."""
    if place.toy:
        small = (("img_size", 32), ("depth", 2), ("embed_dim", 32), ("num_heads", 2))
        return Images(
            "vit-s16",
            "timm",
            "vit_small_patch16_224",
            side=32,
            rows=4,
            options=small,
            classes=10,
            images=64,
            workers=0,
        )
    return Images("vit-s16", "timm", "vit_small_patch16_224", side=224, rows=256)


@line(
    "speed",
    name="vit-s16",
    seconds=120,
    numbers=["images_per_second", *NUMBERS],
    on_gpu=ON_GPU,
    packages=["timm"],
)
def vit_s16(place: Place) -> Result:
    return beside(vit_s16_workload(place), place, steps=3 if place.toy else 40)


@line("speed", name="vit-s16-others", seconds=100, numbers=["loops"], packages=["timm"])
def vit_s16_others(place: Place) -> Result:
    others = [
        Other("transformers' Trainer", by_trainer, True),
    ]
    steps = 3 if place.toy else 40
    return once_each(vit_s16_workload(place), place, steps=steps, others=others)


def resnet50_workload(place: Place) -> Workload:
    """ResNet-50 at 224 pixels, channels last."""
    if place.toy:
        return Images(
            "resnet50",
            "torchvision",
            "resnet18",
            side=64,  # of 32, one pixel is left, of which BatchNorm has no variance
            rows=4,
            channels_last=True,
            classes=10,
            images=64,
            workers=0,
        )
    return Images("resnet50", "torchvision", "resnet50", side=224, rows=256, channels_last=True)


@line(
    "speed",
    name="resnet50",
    seconds=140,
    numbers=["images_per_second", *NUMBERS],
    on_gpu=ON_GPU,
    packages=["torchvision"],
)
def resnet50(place: Place) -> Result:
    return beside(resnet50_workload(place), place, steps=3 if place.toy else 40)


@line("speed", name="resnet50-others", seconds=120, numbers=["loops"], packages=["torchvision"])
def resnet50_others(place: Place) -> Result:
    others = [
        Other("transformers' Trainer", by_trainer, True),
    ]
    steps = 3 if place.toy else 40
    return once_each(resnet50_workload(place), place, steps=steps, others=others)


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
    ema = EMA(model, decay=0.999)
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


STALLS = ["small_stall_ms", "small_call_ms", "large_stall_ms", "large_call_ms"]


@line("speed", seconds=100, numbers=STALLS)
def checkpoint_stall(place: Place) -> Result:
    """Time what training loses by a save, for 1.5 and 14.8 GB of weights and AdamW state.

    It is the time of the call and of the step after it, without the median time of a step.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=place.toy, project_dir=str(place.folder))
    sizes = {"small": 0.001e9, "large": 0.004e9} if place.toy else {"small": 1.5e9, "large": 14.8e9}
    numbers: dict[str, float] = {}
    for name, size in sizes.items():
        width = int((size / 12 / 8) ** 0.5)
        layers = [nn.Linear(width, width, bias=False, device=place.device) for _ in range(8)]
        model = accelerator.prepare(nn.Sequential(*layers))
        numbers[f"{name}_gb"] = 12 * 8 * width**2 / 1e9
        stalls = _stalls(model, width, Checkpoints(place.folder / name, accelerator), place)
        numbers |= {f"{name}_{key}": value for key, value in stalls.items()}
        shutil.rmtree(place.folder / name)
        del model, layers
    says = ", ".join(
        f"{numbers[f'{name}_gb']:.1f} GB: {numbers[f'{name}_stall_ms']:.1f} ms, of which the call "
        f"{numbers[f'{name}_call_ms']:.1f} ms (the first save "
        f"{numbers[f'{name}_first_stall_ms']:.0f} ms; steps of {numbers[f'{name}_step_ms']:.0f} ms)"
        for name in sizes
    )
    return Result(says, numbers)


def _stalls(
    model: nn.Module, width: int, checkpoints: Checkpoints, place: Place
) -> dict[str, float]:
    """Train, save a few times, and return the milliseconds that training loses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randn(64 if place.toy else 2048, width, device=place.device)
    state = RunState(model, optimizer, parts={})
    checkpoints.saving.overlaps = True

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
        checkpoints.saving.prepare(lambda: state.bytes_of_rank(checkpoints))
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
