"""``oneloop plan``: does a run fit, what does it transfer, which change makes it fit; no GPU."""

import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from oneloop.basics.exit_codes import DONE, ERROR, BadInput
from oneloop.basics.files import dumps, printable
from oneloop.tools.plan.changes import fitting_change
from oneloop.tools.plan.description import Memory, Plan
from oneloop.tools.plan.gpus import ANY, GIB, GPUS, Gpu
from oneloop.tools.plan.planned import planned

# Whether a run fits (None: not known): the first words, and the exit code.
_ANSWERS = {True: ("fits", DONE), False: ("does not fit", ERROR), None: ("may fit", 3)}


def run(given: Namespace) -> int:
    """Plan a run.

    Args:
        given: The options of :func:`oneloop.tools.plan.command.parsed`.

    Returns:
        The exit code: 0 if the run fits, 1 if not, 3 if that is not known.

    Raises:
        BadInput: The run cannot be planned.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan = planned([given.asked])[0]
    if isinstance(plan, str):
        raise BadInput(plan)

    # Without --gpu, the run must fit on the largest one.
    word, gpu = max(GPUS.items(), key=lambda item: item[1].memory)
    if given.device is not None:
        plan.gpu, gpu = given.device
        word = given.gpu

    # What is not counted exactly may change the answer.
    enough = gpu.holds(plan.memory.total)
    doubts = plan.not_counted.more if enough else plan.not_counted.less
    plan.fits = None if doubts else enough
    if not enough and not given.no_changes:
        plan.change = fitting_change(given.asked, plan, gpu, word)

    if given.json:
        print(dumps(asdict(plan)))
    else:
        lines = [*_verdict(plan, gpu, doubts, tried=not given.no_changes), *_costs(plan)]
        print(printable("\n".join(lines)))
    return _ANSWERS[plan.fits][1]


def _verdict(plan: Plan, gpu: Gpu, doubts: Sequence[str], *, tried: bool) -> Iterator[str]:
    """Yield the three lines that answer the question; ``tried``: whether changes were planned."""
    # Does it fit?
    memory = plan.memory
    line = _ANSWERS[plan.fits][0]
    if plan.gpu is None:
        line += f" on {', '.join(plan.fits_on) or 'a known GPU'}"
    line += f": {memory.total / GIB:.2f} GiB per process"
    if plan.gpu is not None:
        left = f"{gpu.memory - memory.total / GIB:.2f} GiB left"
        line += f", of {gpu.memory:g} GiB of {plan.gpu}, {left}"
    if doubts:
        line += f"; not counted exactly: {'; '.join(doubts)}"
    yield line

    # What limits it?
    unit, name = _unit(memory)
    peak = memory.largest
    kind, size = next(iter(peak.kinds.items()))
    operator = peak.operator.removeprefix("aten.")
    yield (
        f"limited by {kind}: {size / unit:,.2f} of {peak.peak / unit:,.2f} {name} at the peak, "
        f"in the {peak.stage} of {peak.module or 'the model'} ({operator})"
    )

    # What would make it fit?
    counted = "what was counted" if doubts else "it"
    if plan.change is not None:
        least = "at least " if plan.not_counted.more else ""
        needs = f"{least}{plan.change['total'] / GIB:.2f} GiB"
        yield f"change that makes {counted} fit ({needs}): {plan.change['command']}"
    elif gpu.holds(memory.total):
        yield f"no change is needed for {counted} to fit"
    elif tried:
        yield f"no change makes {counted} fit, alone or together with the others"
    else:
        yield "no change was tried"


def _costs(plan: Plan) -> Iterator[str]:
    """Yield the lines about memory, one step, and the whole run."""
    yield from _table(plan.memory)
    host = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in plan.host.items())
    yield f"host memory per node, GiB: {host}"

    # One step.
    layout = f"{Path(plan.config_file).stem}, {plan.mixed_precision}, {plan.processes} processes"
    yield (
        f"\none step of a process ({layout}): {plan.accumulate} micro-batches of "
        f"{plan.micro} samples"
    )
    recomputed = plan.flops.get("recompute", 0) / 1e12
    yield f"  {plan.flops['total'] / 1e12:,.3f} TFLOP, of which {recomputed:,.3f} recompute"
    for call in plan.collectives:
        if call.wire >= 5e3:  # smaller ones would be printed as 0.00 MB
            each = f"{call.calls:,} of {call.size / 1e6:,.2f} MB over {call.ranks} processes"
            yield f"  {call.name:16}{each}; one process sends {call.wire / 1e6:,.2f} MB"

    yield _kernels(plan)

    # The whole run.
    length = f"{plan.run['steps']:,} steps, {plan.run['samples']:,} samples"
    if plan.run["tokens"]:
        length += f", {plan.run['tokens']:,.0f} tokens"
    yield f"{plan.parameters:,} parameters; {length}"
    yield (
        f"checkpoint {plan.disk['checkpoint'] / 1e9:,.2f} GB; disk space for the run "
        f"{plan.disk['total'] / 1e9:,.2f} GB"
    )
    if plan.network:
        yield plan.network
    left_out = plan.not_counted
    for line in dict.fromkeys([*left_out.other, *left_out.more, *left_out.less]):
        yield f"not counted: {line}"


def _kernels(plan: Plan) -> str:
    """Return the line on the GPU whose kernels are planned."""
    major, minor = plan.capability
    line = f"kernels of a GPU with compute capability {major}.{minor}"
    if plan.capability == ANY:
        line += " or higher"
    if plan.varlen:
        line += "; packed rows use variable-length attention, without masks"
    older = [name for name, gpu in GPUS.items() if gpu.capability < ANY]
    if plan.varlen and plan.capability == ANY:
        line += f" (not on {' and '.join(older)}: plan these with --gpu)"
    return line


def _unit(memory: Memory) -> tuple[float, str]:
    """Return the unit of the table in bytes, and its name."""
    if memory.total > 4 * GIB:
        return GIB, "GiB"
    return GIB / 1024, "MiB"


def _table(memory: Memory) -> Iterator[str]:
    """Yield the table of memory: a row for each kind, a column for each phase."""
    unit, name = _unit(memory)
    phases = memory.phases()
    rows: dict[str, list[float]] = {}
    for phase in phases.values():
        for kind in phase.kinds:
            rows[kind] = [other.kinds.get(kind, 0) / unit for other in phases.values()]
    for label, size in memory.allowances.items():
        rows[f"{label} (rule of thumb)"] = [size / unit] * len(phases)

    # Skip rows that would be printed as 0.00; the total is that of the printed ones.
    rows = {label: sizes for label, sizes in rows.items() if max(sizes) >= 0.005}
    rows["total"] = [sum(sizes) for sizes in zip(*rows.values(), strict=True)]
    yield f"\n{name + ' per process':34}" + "".join(f"{phase:>12}" for phase in phases)
    for label, sizes in rows.items():
        yield f"  {label:32}" + "".join(f"{size:12,.2f}" for size in sizes)
