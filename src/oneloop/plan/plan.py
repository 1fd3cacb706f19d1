"""``oneloop plan``: does a run fit, what does it transfer, and what is the cheapest change; needs
no GPU."""

import os
import shlex
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oneloop.basics.command_options import Options, positive
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, printable
from oneloop.launch.command import config_file
from oneloop.measure.flops import PEAKS
from oneloop.plan.planned import GIB, Asked, planned

_HELP = """Report memory, transfers and FLOPs of a run on any number of GPUs, and the cheapest \
change that makes it fit.

  oneloop plan llama-7b --config_file fsdp2 --mixed_precision bf16 --processes 64 --gpu h100

Runs the real step of training on tensors without memory, on a CPU. The exit code is 1 if the run \
does not fit.
"""


class Gpu(NamedTuple):
    memory: float  # GiB, as torch reports it
    name: str  # in PEAKS
    link: float  # GB/s to the next GPU, in one direction


GPUS = {
    "b200": Gpu(178.4, "B200", 900),
    "h200": Gpu(139.8, "H200", 450),
    "h100": Gpu(79.1, "H100", 450),
}
GPUS |= {
    "a100-80": Gpu(79.1, "A100", 300),
    "l40s": Gpu(44.4, "L40S", 32),
    "a100-40": Gpu(39.4, "A100", 300),
}
GPUS |= {
    "v100-32": Gpu(31.7, "V100", 150),
    "4090": Gpu(23.5, "4090", 32),
    "3090": Gpu(23.6, "3090", 32),
}
GPUS |= {"a10g": Gpu(22.1, "A10G", 32), "l4": Gpu(22.0, "L4", 32), "t4": Gpu(14.6, "T4", 32)}
"""memory as torch reports it, and the links of the data sheets (NVLink, or PCIe 4.0 x16)"""
_SHARE, _HOST_LINK = 0.5, 25e9  # share of the peak FLOP/s; bytes/s between device and host
_RECOMPUTE = {"selective": 0.05, "full": 1.0}  # additional share of the forward's FLOPs


def main(words: Sequence[str]) -> int:
    """Plan a run; return 0 if it fits and 1 if not. Raise BadInput."""
    options = Options("plan", _HELP, usage="oneloop plan RECIPE [--key value …] [OPTIONS]")
    options.add_argument(
        "--config_file", metavar="FILE", help="the layout (ddp, fsdp2, …); default: single or ddp"
    )
    options.add_argument(
        "--processes",
        type=positive(int),
        metavar="N",
        help="default: the number in the config file",
    )
    options.add_argument(
        "--nodes", type=positive(int), metavar="M", help="default: the number in the config file"
    )
    precisions: Any = {
        "choices": ("no", "bf16", "fp16", "fp8"),
        "help": "default: that of the config file",
    }
    options.add_argument("--mixed_precision", **precisions)
    options.add_argument(
        "--gpu", metavar="GPU", help=f"{', '.join(GPUS)}, or its memory in GiB (23.5)"
    )
    options.add_argument(
        "--no_changes", action="store_true", help="do not search for a change that makes it fit"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    given, training = options.parse_known_args(words)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpu = _gpu(given.gpu)
    asked = _asked(given, training)
    plan: dict[str, Any] = planned([asked])[0]
    if "error" in plan:
        raise BadInput(plan["error"])
    plan["fits_on"] = [
        name for name, one in GPUS.items() if plan["memory"]["total"] <= one.memory * GIB
    ]
    fits = plan["memory"]["total"] <= gpu[1].memory * GIB if gpu else bool(plan["fits_on"])
    largest = gpu or max(GPUS.items(), key=lambda item: item[1].memory)
    plan |= {"gpu": gpu and gpu[0], "fits": fits, "change": None}
    if not fits and not given.no_changes:
        plan["change"] = cheapest(asked, plan, largest[1], given.gpu or largest[0])
    print(dumps(plan) if given.json else printable("\n".join(_lines(plan, given, largest))))
    return int(not fits)


def _gpu(text: str | None) -> tuple[str, Gpu] | None:
    if text is None or text in GPUS:
        return None if text is None else (text, GPUS[text])
    try:
        memory = float(text)
    except ValueError:
        memory = 0.0
    if not 0 < memory < inf:
        raise BadInput(
            f"--gpu {text} is unknown; known: {', '.join(GPUS)}, or its memory in GiB (--gpu 23.5)"
        )
    return "a GPU", GPUS["h100"]._replace(memory=memory)


def _asked(given: Namespace, training: Sequence[str]) -> Asked:
    """Return what to plan; fill in numbers from the config file. Raise BadInput."""
    if not training or training[0].startswith("-"):
        raise BadInput(
            "oneloop plan takes a recipe first; for example: oneloop plan gpt --processes 8"
        )
    file = given.config_file or ("ddp" if (given.processes or 1) > 1 else "single")
    try:
        config = yaml.safe_load(Path(config_file(file)).read_text())
        processes, nodes = (int(config.get(key) or 1) for key in ("num_processes", "num_machines"))
    except (OSError, AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
        raise BadInput(
            f"--config_file {file} is not a config file of accelerate that can be read: {error}"
        ) from None
    processes, nodes = given.processes or processes, given.nodes or nodes
    if processes % nodes:
        raise BadInput(
            f"{processes} processes cannot be divided among {nodes} nodes; change --processes "
            "or --nodes"
        )
    return Asked(tuple(training), file, processes, nodes, given.mixed_precision)


class Change(NamedTuple):
    words: tuple[str, ...]  # options and keys of a combination of changes
    seconds: float  # predicted, per step
    least: float  # bytes that it needs at least
    asked: Asked


def grid(asked: Asked, plan: Mapping[str, Any], gpu: Gpu) -> list[Change]:
    """Return all combinations of changes that do not change the result, the cheapest first.

    The cost of each change is predicted from the plan: FLOPs at half of the device's peak, bytes at
    the speed of links. What it saves is an upper bound: all that it could save."""
    second, link = max(PEAKS[gpu.name].values()) * _SHARE, gpu.link * 1e9
    flops, memory, ranks, micro = plan["flops"], plan["memory"], plan["processes"], plan["micro"]
    kinds, kept = memory["step"]["kinds"], memory["kept"]
    phases = [memory[phase] for phase in ("step", "evaluation") if phase in memory]
    words = ("activations", "temporaries")
    activations = max(
        sum(n for k, n in one["kinds"].items() if k.split()[0] in words) for one in phases
    )
    gradients, ema = kinds.get("gradients", 0), kept.get("EMA", 0)
    state = gradients + ema + kept["parameters"] + kept.get("optimizer", 0)
    sent: Any = Counter()
    for call in plan["collectives"]:
        sent[call["name"]] += call["wire"]
    ways: dict[str, list[Any]] = defaultdict(list)
    if not plan["sharded"] and ranks > 1:
        more = plan["wire"] * plan["accumulate"] / link
        ways["shard"].append((("--config_file", "fsdp2"), more, state * (1 - 1 / ranks)))
    if (
        plan["sharded"]
        and plan["accumulate"] > 1
        and not plan["sync_each_batch"]
        and not plan["exact"]
    ):
        more = sent["reduce-scatter"] * (plan["accumulate"] - 1) / link
        ways["sync"].append((("--machine.sync_each_batch", "true"), more, gradients))
    if plan["fused_loss"] == "auto":
        ways["fuse"].append(
            (("--task.fused_loss", "true"), 0.02 * flops["forward"] / second, activations)
        )
    for part in (2**power for power in range(1, micro.bit_length()) if micro % 2**power == 0):
        # else the micro-batch changes the result
        if not plan["exact"] and not plan["batch_statistics"]:
            more = (part - 1) * (0.005 * flops["total"] / second + sent["all-gather"] / link)
            ways["micro"].append(
                (("--batch.micro", str(micro // part)), more, activations * (1 - 1 / part))
            )
    if len(phases) == 2 and phases[1]["peak"] > phases[0]["peak"]:
        ways["eval"] += [
            (("--eval.micro", str(n)), 0.0, activations)
            for n in sorted({1, (micro + 3) // 4, micro})
        ]
    for mode, share in _RECOMPUTE.items() if plan["blocks"] and plan["recompute"] == "none" else ():
        ways["mode"].append(
            (("--machine.recompute", mode), share * flops["forward"] / second, activations)
        )
    if ema:
        ways["ema"].append((("--ema.device", "cpu"), ema / _HOST_LINK, ema))
    found = []
    for chosen in product(*([((), 0.0, 0.0), *several] for several in ways.values())):
        words = tuple(word for way in chosen for word in way[0])
        shard = words[:1] == ("--config_file",)
        keys = words[2:] if shard else words
        file = "fsdp2" if shard else asked.config_file
        changed = replace(asked, training=(*asked.training, *keys), config_file=file)
        found.append(
            Change(
                words,
                sum(way[1] for way in chosen),
                memory["total"] - sum(w[2] for w in chosen),
                changed,
            )
        )
    return sorted(
        (change for change in found if change.words),
        key=lambda change: (change.seconds, len(change.words)),
    )


def cheapest(asked: Asked, plan: Mapping[str, Any], gpu: Gpu, name: str) -> dict[str, Any] | None:
    """Plan the changes again, the cheapest first; return the first one that fits, or None."""
    left = [change for change in grid(asked, plan, gpu) if change.least <= gpu.memory * GIB]
    largest = {  # the combinations that save most; FSDP2 and the fused loss can also cost memory
        (change.asked.config_file, "--task.fused_loss" in change.words): change.asked
        for change in sorted(left, key=lambda change: (-change.least, change.seconds))
    }
    if not any(
        "error" in one or one["memory"]["total"] <= gpu.memory * GIB
        for one in planned([*largest.values()])
    ):
        return None
    while left:
        tried, left = left[:2], left[2:]
        for change, again in zip(tried, planned([one.asked for one in tried]), strict=True):
            if "error" not in again and (total := again["memory"]["total"]) <= gpu.memory * GIB:
                command = shlex.join(["oneloop", "plan", *change.asked.words(), "--gpu", name])
                return {
                    "words": list(change.words),
                    "command": command,
                    "total": total,
                    "seconds": change.seconds,
                }
    return None


def _lines(plan: Mapping[str, Any], given: Namespace, device: tuple[str, Gpu]) -> Iterator[str]:
    memory = plan["memory"]
    unit, name = (GIB, "GiB") if memory["total"] > 4 * GIB else (GIB / 1024, "MiB")
    peaks = {phase: memory[phase] for phase in ("step", "evaluation") if phase in memory}
    total, room = f"{memory['total'] / GIB:.2f} GiB per process", device[1].memory
    if plan["gpu"]:
        left = f"{room:g} GiB of {plan['gpu']}, {room - memory['total'] / GIB:.2f} GiB left"
        yield f"{'fits' if plan['fits'] else 'does not fit'}: {total}, of {left}"
    else:
        yield (
            f"fits on {', '.join(plan['fits_on'])}: {total}"
            if plan["fits"]
            else f"fits on no known GPU: {total}"
        )
    peak = max(peaks.values(), key=lambda one: one["peak"])
    kind, size = next(iter(peak["kinds"].items()))
    place = (
        f"{peak['stage']} of {peak['module'] or 'the model'} "
        f"({peak['operator'].removeprefix('aten.')})"
    )
    yield (
        f"limited by {kind}: {size / unit:,.2f} of {peak['peak'] / unit:,.2f} {name} at the peak, "
        f"in the {place}"
    )
    found = (
        "no change "
        f"{'is needed' if plan['fits'] else 'was tried' if given.no_changes else 'makes it fit'}"
    )
    change = plan["change"]
    yield (
        f"cheapest change ({change['total'] / GIB:.2f} GiB): {change['command']}"
        if change
        else found
    )
    yield f"\n{name + ' per process':34}" + "".join(f"{phase:>12}" for phase in peaks)
    labels = [label for one in peaks.values() for label in one["kinds"]]
    rows = {label: [one["kinds"].get(label, 0) for one in peaks.values()] for label in labels}
    rows |= {
        f"{label} (rule of thumb)": [size] * len(peaks)
        for label, size in memory["allowances"].items()
    }
    rows = {label: sizes for label, sizes in rows.items() if max(sizes) / unit >= 0.005}
    rows["total"] = [sum(each) for each in zip(*rows.values(), strict=True)]
    yield from (
        f"  {label:32}" + "".join(f"{size / unit:12,.2f}" for size in sizes)
        for label, sizes in rows.items()
    )
    yield "host memory per node, GiB: " + ", ".join(
        f"{name} {size / GIB:,.2f}" for name, size in plan["host"].items()
    )
    flops, run, disk = plan["flops"], plan["run"], plan["disk"]
    layout = (
        f"{Path(plan['config_file']).stem}, {plan['mixed_precision']}, {plan['processes']} "
        "processes"
    )
    yield (
        f"\none step of a process ({layout}): {plan['accumulate']} micro-batches of "
        f"{plan['micro']} samples"
    )
    yield (
        f"  {flops['total'] / 1e12:,.3f} TFLOP, of which {flops.get('recompute', 0) / 1e12:,.3f} "
        "recompute"
    )
    for call in (call for call in plan["collectives"] if call["wire"] >= 5e3):
        each = f"{call['calls']:,} of {call['size'] / 1e6:,.2f} MB over {call['ranks']} processes"
        yield f"  {call['name']:16}{each}; one process sends {call['wire'] / 1e6:,.2f} MB"
    tokens = f", {run['tokens']:,.0f} tokens" if run["tokens"] else ""
    yield (
        f"{plan['parameters']:,} parameters; {run['steps']:,} steps, {run['samples']:,} "
        f"samples{tokens}"
    )
    yield (
        f"checkpoint {disk['checkpoint'] / 1e9:,.2f} GB; disk space for the run "
        f"{disk['total'] / 1e9:,.2f} GB"
    )
    yield from (f"not counted: {line}" for line in plan["not_counted"])
