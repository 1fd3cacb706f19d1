"""Part speed of ``gpu_day.py``: oneloop beside a plain loop with the same compiled model.

The rates of this card come first, since floors are computed from them. Then each workload runs with
a plain loop, with oneloop, and with oneloop without its checks. They are compiled, and run in turns
(A B C A, then A C B A, ...; the second A is the control). All get the same batches. The loops start
one after the other, so that each has the device and the CPUs for itself. Ratios are those of one
round; their median is reported. Lines named "-rivals" time loops of other libraries in the same
way. Lines named "-others" time more loops, once each: with other settings, and without compile.
"""

from __future__ import annotations

import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpu_lines import Place, Result, line
from gpu_loops import (
    by_accelerate,
    by_hand,
    by_oneloop,
    by_oneloop_unchecked,
    by_oneloop_with_logits,
)
from gpu_pacer import LOG_EVERY, SKIPPED, Contender, Loop, Setting
from gpu_rivals import by_sft_trainer, by_timm, by_trainer, by_tuned_trainer
from gpu_trace import Reduced, events_of, reduce
from gpu_workloads import Images, Text, Workload
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

STEPS = LOG_EVERY  # of a timed phase
ROUNDS = 6
FEWEST = 3  # rounds, if no time is left for more
CONTROL = 0.03  # a control further from 1 makes the line void
WARMED = 2  # steps of the first phase, after those that every phase skips
WAITED = 3 * LOG_EVERY  # steps in which host waits are counted
TRACED = LOG_EVERY  # steps of a trace: it has exactly one log step if they are not slow
PHASES = "time of the device by phase"  # table of a trace
SLOW = 0.1  # seconds of a step above which these are fewer steps
RESERVE = 60.0  # seconds that must be left to start another loop
BYTES_PER_PARAMETER = 44  # norm 4, clip 8 or less, AdamW 28, EMA 12: read and written, float32


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


class Arm(NamedTuple):
    """A loop that is timed."""

    name: str
    loop: Loop
    compiled: bool = True
    kernels_of: str = ""  # an arm that started earlier, whose compiled kernels this one finds
    ours: bool = True  # a failure fails the line; that of another library's loop is only noted


BY_HAND = "by hand"
OURS = "oneloop"
PAIR = (
    Arm(BY_HAND, by_hand),
    Arm(OURS, by_oneloop),
    Arm("oneloop, check_every 0", by_oneloop_unchecked, kernels_of=OURS),
)


class Timed:
    """What was measured of an arm.

    Args:
        arm: the loop.
        workload: what it trains.
        place: where the line runs.
    """

    def __init__(self, arm: Arm, workload: Workload, place: Place) -> None:
        self.arm = arm
        self.contender = contender(arm, workload, place)
        self.start = 0.0  # seconds until it had made its first steps, alone on the device
        self.seconds: list[float] = []  # of a step, by round
        self.allocated = 0.0  # bytes, at most
        self.reserved = 0.0
        self.trace: Reduced | None = None
        self.waits: dict[str, float] = {}
        self.host: list[dict[str, Any]] = []
        self.failed = ""  # why the loop of another library has ended

    @property
    def median(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds) if self.seconds else math.nan

    def ask(self, kind: str, count: int) -> Any:
        """Run a phase, and return its answer; None if the loop has failed, now or earlier."""
        if self.failed:
            return None
        try:
            return self.contender.ask(kind, count)
        except RuntimeError as error:
            if self.arm.ours:
                raise
            self.failed = str(error)[:160]
            self.contender.stop()
            return None

    def time(self, steps: int) -> float:
        """Run some steps, and return the seconds of one; NaN if the loop has failed."""
        answer = self.ask("time", steps)
        if answer is None:
            return math.nan
        self.start = self.start or answer["since_start"]
        self.allocated = max(self.allocated, answer.get("allocated", 0.0))
        self.reserved = max(self.reserved, answer.get("reserved", 0.0))
        return float(answer["seconds"]) / steps


def beside(
    workload: Workload, place: Place, *, steps: int, arms: Sequence[Arm] = PAIR, host: bool = True
) -> Result:
    """Time loops in turns.

    Args:
        workload: what they train.
        place: where the line runs.
        steps: of a timed phase.
        arms: the loops; the others are compared with the first one.
        host: also profile the host, in arms that share their kernels with no other one.

    Returns:
        Numbers of the first arm and of oneloop, and a table of all of them.

    Raises:
        RuntimeError: a loop of ours failed, or the rates of this card are not known.
    """
    if "matmul_tflops" not in place.rates:
        raise RuntimeError("speed/card gave no rates, which all numbers are compared with")

    # Each phase trains on all batches once, so that all of them train on the same ones.
    if isinstance(workload, Text):
        workload = replace(workload, batches=SKIPPED + steps)
    timed: list[Timed] = []
    with ExitStack() as running:
        # Start and warm up one after the other.
        for arm in arms:
            one = Timed(arm, workload, place)
            running.callback(one.contender.stop)
            timed.append(one)
            if not arm.ours and time.monotonic() > place.until - 2 * RESERVE:
                one.failed = "no time was left"
            one.time(WARMED)

        # Time them in turns, in every second round backwards. The first one also ends each round.
        first, *others = timed
        again: list[float] = []
        for number in range(2 if place.toy else ROUNDS):
            if number >= FEWEST and time.monotonic() > place.until - RESERVE:
                break
            first.seconds.append(first.time(steps))
            for one in others if number % 2 == 0 else others[::-1]:
                one.seconds.append(one.time(steps))
            again.append(first.time(steps))

        # Look into a few steps, and count the host's waits.
        waited, traced = (WAITED, TRACED)
        if place.toy:
            waited, traced = (4, 2)
        elif first.median > SLOW:
            waited, traced = (WAITED // 4, TRACED // 2)
        for one in timed:
            one.trace = one.ask("trace", traced)
            one.waits = one.ask("waits", waited) or {}
            if host and not one.arm.kernels_of:
                one.host = one.ask("host", traced) or []
    return summed_up(workload, place, timed, again)


def once_each(workload: Workload, place: Place, *, steps: int, others: list[Arm]) -> Result:
    """Time other loops once each. A failure of one is noted, and does not fail the line."""
    plain = [
        Arm("by hand, compile off", by_hand, compiled=False),
        Arm("oneloop, compile off", by_oneloop, compiled=False),
    ]
    if isinstance(workload, Text):
        workload = replace(workload, batches=SKIPPED + steps)
    timed: list[Timed] = []
    for arm in [*others, *plain]:
        one = Timed(arm._replace(ours=False), workload, place)
        timed.append(one)
        if time.monotonic() > place.until - RESERVE:
            one.failed = "no time was left"
        one.seconds.append(one.time(steps))
        one.trace = one.ask("trace", 2 if place.toy else TRACED // 2)
        one.contender.stop()

    # Only now ask CUDA about the device: no process that is forked later could use CUDA.
    rows = [row(one, workload, place) for one in timed]
    ran = [one for one in timed if not one.failed]
    says = "; ".join(
        f"{one.arm.name}: {workload.per_step / one.median:,.0f} {workload.unit}/s" for one in ran
    )
    return Result(says or "no loop ran", {"loops": float(len(ran))}, {"loops": rows})


def contender(arm: Arm, workload: Workload, place: Place) -> Contender:
    """Start the process of an arm."""
    setting = Setting(
        workload=workload,
        device=place.device,
        mixed_precision=place.precision,
        compiled=arm.compiled and not place.toy,
        folder=place.folder / slug(arm.name),
        kernels=place.folder / slug(arm.kernels_of or arm.name),
    )
    return Contender(arm.loop, setting)


def slug(name: str) -> str:
    """Return a name of words for files and numbers."""
    return re.sub(r"\W+", "_", name).strip("_")


def row(one: Timed, workload: Workload, place: Place, first: Timed | None = None) -> dict[str, Any]:
    """Return an arm's row of the table of loops.

    Args:
        one: the arm.
        workload: what it trains.
        place: where the line runs.
        first: the arm that it is compared with.
    """
    if one.failed:
        return {"loop": one.arm.name, "failed": one.failed}
    rate = workload.per_step / one.median
    tflops = rate * workload.flops_per_unit / 1e12
    causal = rate * workload.causal_flops_per_unit / 1e12
    found = {
        "loop": one.arm.name,
        f"{workload.unit} per second": rate,
        "ms per step": 1e3 * one.median,
        "TFLOP/s": tflops,
        "MFU": tflops / peak_tflops(place),
        "MFU, causal": causal / peak_tflops(place),
        "share of the measured matmul rate": tflops / place.rates["matmul_tflops"],
        "allocated GiB": one.allocated / 2**30,
        "reserved GiB": one.reserved / 2**30,
        "first steps after s": one.start,
        "warm kernels": "yes" if one.arm.kernels_of else "no",
    }
    if one.trace is not None:
        found["attention ms per step"] = one.trace.attention_ms
        found["share of attention"] = one.trace.attention_share
    if first is not None:
        ratios = ratios_of(first, one)
        found["speed beside the first"] = statistics.median(ratios)
        found["from"] = min(ratios)
        found["to"] = max(ratios)
        found["memory beside the first"] = one.allocated / (first.allocated or math.nan)
    return found


def ratios_of(first: Timed, one: Timed) -> list[float]:
    """Return how many times as fast an arm is as another one, by round."""
    return [slow / fast for slow, fast in zip(first.seconds, one.seconds)]


def summed_up(workload: Workload, place: Place, timed: list[Timed], again: list[float]) -> Result:
    """Return the numbers and tables of a workload.

    Args:
        workload: what was trained.
        place: where the line ran.
        timed: the arms.
        again: seconds of a step of the first arm, at the end of each round.
    """
    arms = {one.arm.name: one for one in timed}
    first, ours = timed[0], arms[OURS]
    prefix = slug(first.arm.name)
    assert first.trace is not None
    assert ours.trace is not None
    control = statistics.median(late / early for late, early in zip(again, first.seconds))
    rate = workload.per_step / ours.median
    tflops = rate * workload.flops_per_unit / 1e12
    mfu = tflops / peak_tflops(place)
    numbers = {
        f"{workload.unit}_per_second": rate,
        f"{prefix}_{workload.unit}_per_second": workload.per_step / first.median,
        "rounds": float(len(again)),
        "control": control,
        "mfu": mfu,
        "mfu_causal": mfu * workload.causal_flops_per_unit / workload.flops_per_unit,
        "share_of_matmul_rate": rate
        * workload.flops_per_unit
        / 1e12
        / place.rates["matmul_tflops"],
        "flops_per_unit": workload.flops_per_unit,
        "idle_share": ours.trace.idle_share,
        f"{prefix}_idle_share": first.trace.idle_share,
        "kernels_per_step": ours.trace.kernels,
        "kernels_outside": ours.trace.kernels_outside,
        f"{prefix}_kernels_outside": first.trace.kernels_outside,
        "waits_in_trace_per_step": ours.trace.waits,
        "host_waits": float(ours.waits["waits"]),
        f"{prefix}_host_waits": float(first.waits["waits"]),
        "host_waits_in_steps": float(ours.waits["steps"]),
        "logs_in_these_steps": float(ours.waits["steps"] // LOG_EVERY),
    }
    for name, one in arms.items():
        if one.failed:
            continue
        ratios = ratios_of(first, one)
        numbers |= {
            f"{slug(name)}_ratio": statistics.median(ratios),
            f"{slug(name)}_ratio_min": min(ratios),
            f"{slug(name)}_ratio_max": max(ratios),
            f"{slug(name)}_ahead": statistics.median(ratios_of(one, ours)),
            f"{slug(name)}_peak_gib": one.allocated / 2**30,
            f"{slug(name)}_seconds_to_first_steps": one.start,
        }
        if one.trace is not None:
            numbers[f"{slug(name)}_attention_share"] = one.trace.attention_share
    if place.toy:  # without a device there is nothing to trace, and memory is not measured
        numbers = {name: value for name, value in numbers.items() if value == value}
    tables = {"loops": [row(one, workload, place, first) for one in timed]}
    for name, one in arms.items():
        if one.trace is not None:
            tables |= {f"{name}: {title}": rows for title, rows in one.trace.tables.items() if rows}
        if one.host:
            tables[f"{name}: time of the host"] = one.host

    # The sentence: oneloop beside the first arm, and beside those of other libraries. If oneloop
    # is the first arm, the others are beside it.
    compared = f" (control {control:.3f})"
    if ours is not first:
        compared = (
            f", {numbers['oneloop_ratio']:.3f} x {first.arm.name} "
            f"({numbers['oneloop_ratio_min']:.3f} to {numbers['oneloop_ratio_max']:.3f}; control "
            f"{control:.3f})"
        )
    says = (
        f"{rate:,.0f} {workload.unit}/s{compared}; "
        f"{100 * mfu:.1f} % MFU with attention counted as full"
    )
    for one in timed[1:]:
        if one.failed:
            says += f"; {one.arm.name} failed: {one.failed}"
        elif ours is first:
            ratio = statistics.median(ratios_of(first, one))
            says += f"; {one.arm.name} is {ratio:.3f} x as fast"
        elif one is not ours:
            ahead = statistics.median(ratios_of(one, ours))
            says += f"; {ahead:.3f} x {one.arm.name}"
    if abs(control - 1) > CONTROL and not place.toy:
        says += "; VOID, since the control is not within 3 %"
    return Result(says, numbers, tables)


NUMBERS = ["oneloop_ratio", "control", "mfu", "share_of_matmul_rate", "host_waits"]
ON_GPU = [
    "idle_share",
    "kernels_outside",
    "oneloop_peak_gib",
    "oneloop_attention_share",
    "waits_in_trace_per_step",
]
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
    return beside(gpt2_workload(place), place, steps=2 if place.toy else STEPS)


@line("speed", name="gpt2-others", seconds=200, numbers=["loops"])
def gpt2_others(place: Place) -> Result:
    others = [
        Arm("oneloop, logits in memory", by_oneloop_with_logits),
        Arm("Trainer, compiled, dense mask", by_trainer),
    ]
    steps = 2 if place.toy else STEPS
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
    return beside(llama_1b_workload(place), place, steps=2 if place.toy else STEPS)


@line("speed", name="llama-1b-others", seconds=220, numbers=["loops"])
def llama_1b_others(place: Place) -> Result:
    others = [
        Arm("oneloop, logits in memory", by_oneloop_with_logits),
        Arm("Trainer, compiled, dense mask", by_trainer),
    ]
    steps = 2 if place.toy else STEPS
    return once_each(llama_1b_workload(place), place, steps=steps, others=others)


# What users have now. The Trainer's defaults: no compile. Tuned: compile, Liger's kernels and no
# dense mask. Accelerate by hand: compile, and the model's own loss.
RIVALS = (
    Arm(BY_HAND, by_hand),
    Arm(OURS, by_oneloop_unchecked),
    Arm("Trainer, tuned", by_tuned_trainer, ours=False),
    Arm("Trainer", by_trainer, compiled=False, ours=False),
    Arm("Accelerate by hand", by_accelerate, ours=False),
)


@line(
    "speed",
    name="llama-1b-rivals",
    seconds=300,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=[*ON_GPU, "Trainer_tuned_ratio", "Trainer_ratio", "Accelerate_by_hand_ratio"],
    gpu_packages=["liger_kernel"],
)
def llama_1b_rivals(place: Place) -> Result:
    """A Llama of 1 B parameters in the loops that people use today."""
    steps = 2 if place.toy else STEPS
    return beside(llama_1b_workload(place), place, steps=steps, arms=RIVALS, host=False)


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
    return beside(lora_8b_workload(place), place, steps=2 if place.toy else STEPS)


@line("speed", name="lora-8b-others", seconds=240, numbers=["loops"], packages=["peft"])
def lora_8b_others(place: Place) -> Result:
    others = [
        Arm("oneloop, logits in memory", by_oneloop_with_logits),
        Arm("Trainer, without borders, compile off", by_trainer, compiled=False),
    ]
    steps = 2 if place.toy else STEPS
    return once_each(lora_8b_workload(place), place, steps=steps, others=others)


SFT = (
    Arm(BY_HAND, by_hand),
    Arm(OURS, by_oneloop_unchecked),
    Arm("SFTTrainer, padding-free", by_sft_trainer, compiled=False, ours=False),
    Arm("SFTTrainer, padding-free, compiled", by_sft_trainer, ours=False),
)


@line(
    "speed",
    name="lora-8b-rivals",
    seconds=300,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=[*ON_GPU, "SFTTrainer_padding_free_ratio"],
    packages=["peft", "trl", "datasets"],
    gpu_packages=["liger_kernel"],
)
def lora_8b_rivals(place: Place) -> Result:
    """Adapters on full rows of 4,096 tokens, on which padding-free training needs no borders."""
    workload = replace(lora_8b_workload(place), packed=False)
    steps = 2 if place.toy else STEPS
    return beside(workload, place, steps=steps, arms=SFT, host=False)


TIMM = (
    Arm(BY_HAND, by_hand),
    Arm(OURS, by_oneloop_unchecked),
    Arm("timm", by_timm, ours=False),
)


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
    return beside(vit_s16_workload(place), place, steps=3 if place.toy else 2 * STEPS)


@line("speed", name="vit-s16-others", seconds=100, numbers=["loops"], packages=["timm"])
def vit_s16_others(place: Place) -> Result:
    others = [Arm("Trainer, compiled", by_trainer)]
    steps = 3 if place.toy else 2 * STEPS
    return once_each(vit_s16_workload(place), place, steps=steps, others=others)


@line(
    "speed",
    name="vit-s16-rivals",
    seconds=150,
    numbers=["images_per_second", *NUMBERS],
    on_gpu=[*ON_GPU, "timm_ratio"],
    packages=["timm"],
)
def vit_s16_rivals(place: Place) -> Result:
    steps = 3 if place.toy else 2 * STEPS
    return beside(vit_s16_workload(place), place, steps=steps, arms=TIMM, host=False)


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
    return beside(resnet50_workload(place), place, steps=3 if place.toy else 2 * STEPS)


@line("speed", name="resnet50-others", seconds=120, numbers=["loops"], packages=["torchvision"])
def resnet50_others(place: Place) -> Result:
    others = [Arm("Trainer, compiled", by_trainer)]
    steps = 3 if place.toy else 2 * STEPS
    return once_each(resnet50_workload(place), place, steps=steps, others=others)


@line(
    "speed",
    name="resnet50-rivals",
    seconds=150,
    numbers=["images_per_second", *NUMBERS],
    on_gpu=[*ON_GPU, "timm_ratio"],
    packages=["timm"],
)
def resnet50_rivals(place: Place) -> Result:
    steps = 3 if place.toy else 2 * STEPS
    return beside(resnet50_workload(place), place, steps=steps, arms=TIMM, host=False)


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
