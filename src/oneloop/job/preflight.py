"""Before anything is written, a few real samples go through task and model as in a run: what is wrong is told now.

What operations a step is made of, whether it draws random numbers, and which parameters it leaves out is seen on the
way. Nothing is changed by it: buffers, gradients and random states are put back.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.checkpoint.weights import bare
from oneloop.data.seeded_samples import SeededSamples
from oneloop.evaluate import evaluating
from oneloop.job.build import Job
from oneloop.job.trial_passes import Pass, Samples, Wrapped, batch_of, drawn_since, one_pass, random_states, undone
from oneloop.launch.processes import Run
from oneloop.machine.blocks import has_batch_statistics, has_dropout
from oneloop.machine.layout_checks import Checks, changed, content, other_units
from oneloop.measure.meter import OWN_FIGURES
from oneloop.show.graph import Drawing
from oneloop.tasks.protocol_checks import Contract, theirs

SAMPLED = 4  # samples at most; each is loaded twice


@dataclass(frozen=True)
class Preflight:
    """What was seen."""

    flops: float = 0.0  # floating-point operations of training on one sample
    additive: bool = True  # whether a batch's loss is the sum of its samples'
    draws: bool = False  # whether model or loss draw random numbers in training
    metrics: tuple[str, ...] = ()  # names of 0-dim outputs of the loss in training
    unused: list[str] = field(default_factory=list)  # trained parameters that the loss does not use
    moved: str = ""  # the first buffer or parameter that a forward in training changes
    stateful: bool = False
    """whether the same samples with the same seeds gave another loss: something keeps a generator or a counter"""
    linear: bool = True  # whether the gradient of a batch is the sum of its parts'
    graph: Any = None  # the model as TensorBoard draws it, on rank 0


def preflight(job: Job, run: Run, model: nn.Module) -> Preflight:
    """Try the task on the first samples of the run, the same on all ranks. Raise BadInput for what the task does wrong.

    Collective: call on every rank."""
    model, contract = bare(model), Contract(job.task)
    if run.ranks > 1 and not run.sharded:
        model = Wrapped(model)
    number = min(SAMPLED, job.layout.each, len(job.train_set))
    epochs, indices = job.order.at(np.arange(number))
    keyed = SeededSamples(job.train_set, seed=job.recipe.seed)

    def load() -> list[tuple[int, Any]]:
        places = zip(epochs.tolist(), indices.tolist(), strict=True)
        return theirs(job.task, "train_set()", lambda: [keyed[place] for place in places])  # type: ignore[no-any-return]

    samples = load()
    try:
        with undone(model, run.device), _kept(contract), _uncompiled():
            graph = _evaluated(contract, job, run, model, samples)
            return _trained(contract, job, run, model, samples, load(), graph)
    except BadInput as error:
        if run.sharded and isinstance(error.__cause__, RuntimeError):
            raise BadInput(f"{error}; if it runs with ddp.yaml, FSDP2 does not support this model") from error
        raise


def _evaluated(contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples) -> Any:
    """In eval mode: one sample, the same twice, and a held-out one with the metrics. Returns the graph."""
    first = samples[0]
    tolerance = _tolerance(job, run, model)
    with evaluating(model):
        one, weight = batch_of(contract, job, run, [first])
        two, twice = batch_of(contract, job, run, [first, first])
        if contract.additive and not contract.draws:
            contract.doubles("weight", weight, twice, 1e-6)
        before = random_states(run.device)
        drawn = run.main and "tensorboard" in job.recipe.track
        inner = model.module if isinstance(model, Wrapped) else model
        with Drawing(inner, one) if drawn else nullcontext() as drawing:
            once = float(contract.loss(model, one)[0])
        both = float(contract.loss(model, two)[0])
        contract.draws = contract.draws or drawn_since(before, run.device)
        if contract.additive and not contract.draws and not contract.is_double(once, both, tolerance):
            again = float(
                contract.loss(model, one)[0]
            )  # another one by more than rounding: from a generator of its own
            contract.draws = abs(again - once) > tolerance * abs(once)
            if not contract.draws:
                contract.doubles("loss", once, both, tolerance)
        for dataset in job.eval_sets.values():
            held_out = SeededSamples(dataset, seed=job.recipe.seed)
            places = [(0, index) for index in range(min(SAMPLED, job.layout.each, len(dataset)))]
            held = theirs(job.task, "eval_sets()", lambda: [held_out[place] for place in places])  # noqa: B023
            other = Contract(job.task)  # whose keys may be others
            batch, _ = batch_of(other, job, run, held, trained=False)
            other.measured(batch, other.loss(model, batch)[1], run.device)
            break
    return drawing.graph if drawing is not None else None


def _trained(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples, reloaded: Samples, graph: Any
) -> Preflight:
    """In training: forward and backward over a batch, its halves, and the batch again, from the same seeds."""
    half, tolerance = len(samples) // 2, _tolerance(job, run, model)
    whole = not contract.additive or not half or has_batch_statistics(model) or has_dropout(model)
    checks = Checks(model, parameters=run.ranks > 1 or job.exact, report=(moved := list[str]()).append, state=content)
    tried = partial(one_pass, contract, job, run, model, checks)
    try:
        first = tried(samples)
        parts = [] if whole else [tried(samples[:half]), tried(samples[half:])]
        last = tried(reloaded)
        fault = other_units([one.units for one in (first, *parts, last)])
        if len(set(first.units)) > 1 and not has_batch_statistics(
            model
        ):  # which of FSDP2's units run may depend on the sample
            fault = fault or other_units([tried([one], backward=False).units for one in samples])
    except Inexact as error:
        raise BadInput(str(error)) from None
    finally:
        checks.units.closing.close()
    stateful = not _near(first.loss, last.loss, 1e-3 * tolerance)
    _reject(job, run, last, moved, fault, (first.loss, last.loss) if stateful else None)
    draws, linear = contract.draws or any(one.draws for one in (first, *parts, last)), True
    if parts and not draws and not stateful:
        contract.adds_up(first.loss, [one.loss for one in parts], tolerance)
        linear = all(
            _near(total, sum(one.gradients.get(name, (0.0, 0.0))[0] for one in parts), 10 * tolerance, size)
            for name, (total, size) in last.gradients.items()
        )
    found: dict[str, Any] = {"additive": contract.additive, "draws": draws, "stateful": stateful, "linear": linear}
    found |= {"metrics": _figures(contract, last.outputs), "unused": last.unused, "moved": moved[0] if moved else ""}
    return Preflight(flops=last.flops / len(samples), graph=graph, **found)


def _near(a: float, b: float, tolerance: float, size: float | None = None) -> bool:
    """Whether two numbers are equal up to this tolerance, relative to ``size`` (else the first). NaN says nothing."""
    return not math.isfinite(a + b) or abs(a - b) <= tolerance * (abs(a) if size is None else size)


def _reject(job: Job, run: Run, seen: Pass, moved: list[str], units: str, losses: tuple[float, float] | None) -> None:
    """Reject a model that would train other weights on another parallel layout: by the buffers that its forward moved,
    what is wrong with FSDP2's units, and two losses of the same samples with the same seeds, if they differ."""
    if units:
        raise BadInput(units)
    if job.exact and moved:
        raise BadInput(f"batch.grain requires the same buffers on every process, but {changed(moved[0])}")
    if job.exact and losses:
        got = f"got {losses[0]:.9g} and {losses[1]:.9g}"
        why = "the data set, the model or the loss keeps its own generator or counter"
        needs = "batch.grain requires that the same samples with the same seeds give the same loss"
        raise BadInput(f"{needs}; {got}: {why}. Use torch's global generator, or remove batch.grain")
    if seen.sparse:
        raise BadInput(f"the gradient of {seen.sparse[0]} is sparse, which is not supported; set sparse=False")
    unused = seen.unused
    if unused and run.ranks > 1 and not run.sharded and not job.recipe.machine.find_unused_parameters:
        names = f"{', '.join(unused[:3])}{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}"
        ways = "freeze them (requires_grad_(False) in model()), or set --machine.find_unused_parameters true"
        raise BadInput(f"{names} took no part in the loss, and DDP would wait for their gradients; {ways}")


def _figures(contract: Contract, outputs: dict[str, Any]) -> tuple[str, ...]:
    """Names of the 0-dim outputs, which are logged; the loss itself is in any case."""
    names = [name for name, value in outputs.items() if torch.is_tensor(value) and not value.ndim and name != "loss"]
    for name in names:
        if f"train/{name}" in OWN_FIGURES:
            raise contract.wrong("loss", f"returned the metric {name!r} as an output", "train/… has its own: rename it")
    return tuple(name for name in names if not outputs[name].is_complex())


def _tolerance(job: Job, run: Run, model: nn.Module) -> float:
    """How far sums may part by rounding, relative."""
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    if narrow or run.accelerator.mixed_precision != "no" or job.recipe.machine.matmul != "highest":
        return 3e-2
    return 1e-9 if job.dtype is torch.float64 else 1e-4


@contextmanager
def _kept(contract: Contract) -> Iterator[None]:
    """Puts back the state that a task has of its own."""
    if not hasattr(contract.task, "state_dict"):
        yield
        return
    before = contract.state()
    yield
    theirs(contract.task, "load_state_dict", lambda: contract.task.load_state_dict(before))
    if contract.state() != before:
        raise contract.wrong("load_state_dict", "did not restore what state_dict() returned", "set all of it")


def _uncompiled() -> Any:
    """Compiled parts run as they were written: what is tried here has other shapes than a run."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
