"""``oneloop plan``: does a run fit, what does it transfer, what is the cheapest change; no GPU."""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import inf
from operator import add
from pathlib import Path

import yaml

from oneloop.basics.command_options import Options, positive
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, printable
from oneloop.launch.command import config_file
from oneloop.plan.changes import Fitting, cheapest
from oneloop.plan.description import Asked, Memory, NotPlanned, Plan
from oneloop.plan.gpus import GIB, GPUS, Gpu
from oneloop.plan.planned import planned

_HELP = """Report memory, transfers and FLOPs of a run on any number of GPUs, and the cheapest \
change that makes it fit.

  oneloop plan llama-7b --config_file fsdp2 --mixed_precision bf16 --processes 64 --gpu h100

Runs the real step of training on tensors without memory, on a CPU. The exit code is 1 if the run \
does not fit.
"""


@dataclass
class _Answer:
    """Whether the run fits, in the order of ``--json``."""

    fits_on: list[str]  # names of known GPUs
    gpu: str | None  # None: without --gpu
    fits: bool
    change: Fitting | None


def main(words: Sequence[str]) -> int:
    """Plan a run; return 0 if it fits and 1 if not. Raise BadInput."""
    given, training = _options().parse_known_args(words)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    name = None
    if given.gpu is not None:
        name, gpu = _gpu(given.gpu)
    asked = _asked(given, training)
    plan = planned([asked])[0]
    if isinstance(plan, NotPlanned):
        raise BadInput(plan.error)

    # Without --gpu, look for a change that fits on the largest one.
    total = plan.memory.total
    fits_on = []
    for known, one in GPUS.items():
        if one.holds(total):
            fits_on.append(known)
    if name is not None:
        fits = gpu.holds(total)
        word = given.gpu
    else:
        fits = bool(fits_on)
        word, gpu = max(GPUS.items(), key=lambda item: item[1].memory)
    change = None
    if not fits and not given.no_changes:
        change = cheapest(asked, plan, gpu, word)

    answer = _Answer(fits_on, name, fits, change)
    if given.json:
        print(dumps(plan.as_json() | asdict(answer)))
    else:
        lines = [*_verdict(answer, plan.memory, gpu, tried=not given.no_changes), *_costs(plan)]
        print(printable("\n".join(lines)))
    return int(not fits)


def _options() -> Options:
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
    options.add_argument(
        "--mixed_precision",
        choices=("no", "bf16", "fp16", "fp8"),
        help="default: that of the config file",
    )
    options.add_argument(
        "--gpu", metavar="GPU", help=f"{', '.join(GPUS)}, or its memory in GiB (23.5)"
    )
    options.add_argument(
        "--no_changes", action="store_true", help="do not search for a change that makes it fit"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def _gpu(text: str) -> tuple[str, Gpu]:
    """Return the name and the device of ``--gpu``. Raise BadInput."""
    if text in GPUS:
        return text, GPUS[text]
    try:
        memory = float(text)
    except ValueError:
        memory = 0.0
    if not 0 < memory < inf:
        raise BadInput(
            f"--gpu {text} is unknown; known: {', '.join(GPUS)}, or its memory in GiB (--gpu 23.5)"
        )
    # Its speed only orders the changes: take that of a common one.
    return "a GPU", GPUS["h100"]._replace(memory=memory)


def _asked(given: Namespace, training: Sequence[str]) -> Asked:
    """Return what to plan; fill in numbers from the config file. Raise BadInput."""
    if not training or training[0].startswith("-"):
        raise BadInput(
            "oneloop plan takes a recipe first; for example: oneloop plan gpt --processes 8"
        )
    file = given.config_file
    if not file:
        several = given.processes is not None and given.processes > 1
        file = "ddp" if several else "single"
    try:
        config = yaml.safe_load(Path(config_file(file)).read_text(encoding="utf-8"))
        # Read both numbers: a wrong one is rejected, even if an option replaces it.
        processes = int(config.get("num_processes") or 1)
        nodes = int(config.get("num_machines") or 1)
    except (OSError, AttributeError, TypeError, ValueError, yaml.YAMLError) as error:
        raise BadInput(
            f"--config_file {file} is not a config file of accelerate that can be read: {error}"
        ) from None
    processes = given.processes or processes
    nodes = given.nodes or nodes
    if processes % nodes:
        raise BadInput(
            f"{processes} processes cannot be divided among {nodes} nodes; change --processes "
            "or --nodes"
        )
    return Asked(tuple(training), file, processes, nodes, given.mixed_precision)


def _verdict(answer: _Answer, memory: Memory, gpu: Gpu, *, tried: bool) -> Iterator[str]:
    """Yield the three lines that answer the question; ``tried``: whether changes were planned."""
    # Does it fit?
    total = f"{memory.total / GIB:.2f} GiB per process"
    if answer.gpu is not None:
        room = f"{gpu.memory:g} GiB of {answer.gpu}"
        left = f"{gpu.memory - memory.total / GIB:.2f} GiB left"
        fits = "fits" if answer.fits else "does not fit"
        yield f"{fits}: {total}, of {room}, {left}"
    elif answer.fits:
        yield f"fits on {', '.join(answer.fits_on)}: {total}"
    else:
        yield f"fits on no known GPU: {total}"

    # What limits it?
    unit, name = _unit(memory)
    peak = max(memory.phases().values(), key=lambda one: one.peak)
    kind, size = next(iter(peak.kinds.items()))
    operator = peak.operator.removeprefix("aten.")
    yield (
        f"limited by {kind}: {size / unit:,.2f} of {peak.peak / unit:,.2f} {name} at the peak, "
        f"in the {peak.stage} of {peak.module or 'the model'} ({operator})"
    )

    # What would make it fit?
    if answer.change is not None:
        yield f"cheapest change ({answer.change.total / GIB:.2f} GiB): {answer.change.command}"
    elif answer.fits:
        yield "no change is needed"
    elif tried:
        yield "no change makes it fit"
    else:
        yield "no change was tried"


def _costs(plan: Plan) -> Iterator[str]:
    """Yield the lines about memory, one step, and the whole run."""
    yield from _table(plan.memory)
    host = []
    for name, size in plan.host.items():
        host.append(f"{name} {size / GIB:,.2f}")
    yield f"host memory per node, GiB: {', '.join(host)}"

    # One step.
    layout = f"{Path(plan.config_file).stem}, {plan.mixed_precision}, {plan.processes} processes"
    yield (
        f"\none step of a process ({layout}): {plan.accumulate} micro-batches of "
        f"{plan.micro} samples"
    )
    recomputed = plan.flops.get("recompute", 0) / 1e12
    yield f"  {plan.total_flops / 1e12:,.3f} TFLOP, of which {recomputed:,.3f} recompute"
    for call in plan.collectives:
        if call.wire >= 5e3:  # smaller ones would be printed as 0.00 MB
            each = f"{call.calls:,} of {call.size / 1e6:,.2f} MB over {call.ranks} processes"
            yield f"  {call.name:16}{each}; one process sends {call.wire / 1e6:,.2f} MB"

    # The whole run.
    length = f"{plan.run.steps:,} steps, {plan.run.samples:,} samples"
    if plan.run.tokens:
        length += f", {plan.run.tokens:,.0f} tokens"
    yield f"{plan.parameters:,} parameters; {length}"
    yield (
        f"checkpoint {plan.disk.checkpoint / 1e9:,.2f} GB; disk space for the run "
        f"{plan.disk.total / 1e9:,.2f} GB"
    )
    for line in plan.not_counted:
        yield f"not counted: {line}"


def _unit(memory: Memory) -> tuple[float, str]:
    """Return the unit of the table in bytes, and its name."""
    if memory.total > 4 * GIB:
        return GIB, "GiB"
    return GIB / 1024, "MiB"


def _table(memory: Memory) -> Iterator[str]:
    """Yield the table of memory: a row for each kind, a column for each phase."""
    phases = memory.phases()
    rows: dict[str, list[float]] = {}
    for phase in phases.values():
        for label in phase.kinds:
            rows[label] = [other.kinds.get(label, 0) for other in phases.values()]
    for label, size in memory.allowances.items():
        rows[f"{label} (rule of thumb)"] = [size] * len(phases)

    # Skip rows that would be printed as 0.00; the total is that of the printed ones.
    unit, name = _unit(memory)
    yield f"\n{name + ' per process':34}" + "".join(f"{phase:>12}" for phase in phases)
    totals = [0.0] * len(phases)
    for label, sizes in rows.items():
        if max(sizes) / unit >= 0.005:
            totals = list(map(add, totals, sizes))
            yield _row(label, sizes, unit)
    yield _row("total", totals, unit)


def _row(label: str, sizes: Sequence[float], unit: float) -> str:
    return f"  {label:32}" + "".join(f"{size / unit:12,.2f}" for size in sizes)
