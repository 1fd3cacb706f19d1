"""Part speed of ``gpu_day.py``: oneloop beside a plain loop with the same compiled model.

The rates of this card come first, since floors are computed from them. Then each workload runs with
a plain loop, with oneloop, and with oneloop without its checks, compiled and in turns
(``gpu_turns.py``). Lines named "-rivals" time loops of other libraries in the same way. Lines named
"-others" time more loops, once each: with other settings, and without compile.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from gpu_lines import Place, Result, line
from gpu_loops import (
    by_accelerate,
    by_hand,
    by_oneloop_unchecked,
    by_oneloop_with_logits,
)
from gpu_rivals import by_sft_trainer, by_timm, by_trainer, by_tuned_trainer
from gpu_turns import BY_HAND, OURS, STEPS, Arm, beside, once_each
from gpu_workloads import Images, Text, Workload


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


NUMBERS = ["ratio_to_by_hand", "control", "mfu", "share_of_matmul_rate", "host_waits"]
ON_GPU = [
    "idle_share",
    "kernels_outside",
    "peak_gib",
    "attention_share",
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
    seconds=150,
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
    seconds=170,
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
# dense mask. Accelerate by hand: compile, and the model's own loss. In a compiled graph,
# transformers makes a dense mask.
RIVALS = (
    Arm(BY_HAND, by_hand),
    Arm(OURS, by_oneloop_unchecked),
    Arm("Trainer, tuned", by_tuned_trainer, ours=False),
    Arm("Trainer", by_trainer, compiled=False, ours=False),
    Arm("Accelerate by hand, dense mask", by_accelerate, ours=False),
)


@line(
    "speed",
    name="llama-1b-rivals",
    seconds=330,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=[
        *ON_GPU,
        "ratio_to_Trainer_tuned",
        "ratio_to_Trainer",
        "ratio_to_Accelerate_by_hand_dense_mask",
    ],
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
    seconds=200,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=ON_GPU,
    packages=["peft"],
)
def lora_8b(place: Place) -> Result:
    return beside(lora_8b_workload(place), place, steps=2 if place.toy else STEPS // 2)


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
    seconds=280,
    numbers=["tokens_per_second", *NUMBERS],
    on_gpu=[*ON_GPU, "ratio_to_SFTTrainer_padding_free"],
    packages=["peft", "trl", "datasets"],
    gpu_packages=["liger_kernel"],
)
def lora_8b_rivals(place: Place) -> Result:
    """Adapters on full rows of 4,096 tokens, on which padding-free training needs no borders."""
    workload = replace(lora_8b_workload(place), packed=False)
    steps = 2 if place.toy else STEPS // 2
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
    on_gpu=[*ON_GPU, "ratio_to_timm"],
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
    on_gpu=[*ON_GPU, "ratio_to_timm"],
    packages=["timm"],
)
def resnet50_rivals(place: Place) -> Result:
    steps = 3 if place.toy else 2 * STEPS
    return beside(resnet50_workload(place), place, steps=steps, arms=TIMM, host=False)
