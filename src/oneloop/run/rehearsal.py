"""Before anything is written, a few real samples go through task and model as in a run: what is wrong is told now.

What operations a step is made of, whether it draws random numbers, and which parameters it leaves out is seen on the
way. Nothing is changed by it: buffers, gradients and random states are put back.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from oneloop.basics.errors import BadInput
from oneloop.basics.names import bare_name
from oneloop.basics.reseed import reseed
from oneloop.basics.sharding import reshard
from oneloop.checkpoint.weights import bare
from oneloop.data.groups import transferred
from oneloop.data.keyed import Keyed
from oneloop.evaluate import evaluating
from oneloop.machine.randomness import has_batch_statistics, has_dropout
from oneloop.measure.meter import OWN_FIGURES
from oneloop.measure.throughput import Operations
from oneloop.run.job import Job
from oneloop.run.processes import Run
from oneloop.show.graph import Drawing
from oneloop.tasks.contract import Contract, theirs

SAMPLED = 4
"""samples at most; each is loaded once"""


@dataclass(frozen=True)
class Rehearsal:
    """What was seen."""

    flops: float = 0.0
    """floating-point operations of training on one sample"""
    additive: bool = True
    """whether a batch's loss is the sum of its samples'"""
    draws: bool = False
    """whether model or loss draw random numbers in training"""
    figures: tuple[str, ...] = ()
    """names of 0-dim outputs of the loss in training"""
    unused: list[str] = field(default_factory=list)
    """trained parameters that took no part in the loss"""
    graph: Any = None
    """the model as TensorBoard draws it, on rank 0"""


def rehearse(job: Job, run: Run, model: nn.Module) -> Rehearsal:
    """Tries the task's contract on the first samples of the run. Every rank must get here, and sees the same samples.

    Args:
        job: whose task and data it is.
        run: its processes.
        model: as prepared.

    Raises:
        BadInput: what the task does wrong, with its file and the way out.
    """
    model, contract = bare(model), Contract(job.task)
    if run.ranks > 1 and not run.sharded:
        model = _Wrapped(model)
    number = min(SAMPLED, job.split.each, len(job.train_set))
    epochs, indices = job.order.at(np.arange(number))
    keyed = Keyed(job.train_set, seed=job.recipe.seed)
    samples = theirs(
        job.task,
        "train_set()",
        lambda: [keyed[place] for place in zip(epochs.tolist(), indices.tolist(), strict=True)],
    )
    with _undone(model, run.device), _kept(contract), _uncompiled():
        graph = _evaluated(contract, job, run, model, samples)
        return _trained(contract, job, run, model, samples, graph)


class _Wrapped(nn.Module):
    """A model as it is under DDP: to be called, and nothing else; without its communication."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"under DDP the model is wrapped, and has no {name!r} of its own: call model(...) itself, and do in its"
                " forward what is needed of it"
            ) from None


def _batch(
    contract: Contract, job: Job, run: Run, samples: list[tuple[int, Any]], *, trained: bool = True
) -> tuple[dict[str, Any], float]:
    """These samples on the device, and what they weigh."""
    before = _random_states(run.device)
    collated = contract.collated([sample for _, sample in samples])
    contract.draws = contract.draws or not _same(before, _random_states(run.device))
    batch = job.collate.completed(collated, [index for index, _ in samples])
    weight = contract.weight(batch, samples=len(samples), trained=trained)
    return next(transferred(iter([batch]), run.device)), weight


def _evaluated(contract: Contract, job: Job, run: Run, model: nn.Module, samples: list[tuple[int, Any]]) -> Any:
    """In eval mode: one sample, the same twice, and a held-out one with the metrics. Returns the graph."""
    first = samples[0]
    tolerance = _tolerance(job, run, model)
    with evaluating(model):
        one, weight = _batch(contract, job, run, [first])
        two, twice = _batch(contract, job, run, [first, first])
        if contract.additive and not contract.draws:
            contract.doubles("weight", weight, twice, 1e-6)
        before = _random_states(run.device)
        drawn = run.main and "tensorboard" in job.recipe.track
        inner = model.module if isinstance(model, _Wrapped) else model
        with Drawing(inner, one) if drawn else nullcontext() as drawing:
            once = float(contract.loss(model, one)[0])
        both = float(contract.loss(model, two)[0])
        contract.draws = contract.draws or not _same(before, _random_states(run.device))
        if contract.additive and not contract.draws and not contract.is_double(once, both, tolerance):
            again = float(
                contract.loss(model, one)[0]
            )  # another one by more than rounding: from a generator of its own
            contract.draws = abs(again - once) > tolerance * abs(once)
            if not contract.draws:
                contract.doubles("loss", once, both, tolerance)
        for dataset in job.eval_sets.values():
            held_out = Keyed(dataset, seed=job.recipe.seed)
            places = [(0, index) for index in range(min(SAMPLED, job.split.each, len(dataset)))]
            held = theirs(job.task, "eval_sets()", lambda: [held_out[place] for place in places])  # noqa: B023
            other = Contract(job.task)  # whose keys may be others
            batch, _ = _batch(other, job, run, held, trained=False)
            other.measured(batch, other.loss(model, batch)[1], run.device)
            break
    return drawing.graph if drawing is not None else None


def _trained(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: list[tuple[int, Any]], graph: Any
) -> Rehearsal:
    """In training: forward and backward, counted, and whether the parts of a batch cost what it does."""
    reseed(run.device, job.recipe.seed, 0)
    before, half, costs = _random_states(run.device), len(samples) // 2, list[float]()
    if contract.additive and half and not has_batch_statistics(model) and not has_dropout(model):
        for part in (samples[:half], samples[half:]):  # before the whole: its backward ends what FSDP2 keeps of them
            batch, _ = _batch(contract, job, run, part)
            costs.append(float(contract.loss(model, batch)[0].detach()))
    batch, _ = _batch(contract, job, run, samples)
    held = {name: buffer.clone() for name, buffer in model.named_buffers()} if job.exact else {}
    with Operations() as counted:
        loss, outputs = contract.loss(model, batch)
        draws = contract.draws or not _same(before, _random_states(run.device))
        counted.backward = True
        theirs(job.task, "loss", loss.backward)
    _refuse_moved(model, held)
    unused = [bare_name(name) for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if unused and run.ranks > 1 and not run.sharded and not job.recipe.machine.find_unused_parameters:
        raise BadInput(
            f"{', '.join(unused[:3])}{f' and {len(unused) - 3} more' if len(unused) > 3 else ''} of the model took no"
            " part in the loss, and DDP would wait for their gradients; freeze them (requires_grad_(False) in model()),"
            " or set --machine.find_unused_parameters true, which costs a walk through the graph at every step"
        )
    if costs and not draws:
        contract.adds_up(float(loss.detach()), costs, _tolerance(job, run, model))
    return Rehearsal(
        flops=counted.total / len(samples),
        additive=contract.additive,
        draws=draws,
        figures=_figures(contract, outputs),
        unused=unused,
        graph=graph,
    )


def _refuse_moved(model: nn.Module, held: dict[str, torch.Tensor]) -> None:
    """Refuses buffers that are no more what they were: each process would have others."""
    buffers = dict(model.named_buffers())
    if moved := [name for name, before in held.items() if not torch.equal(before, buffers[name])]:
        raise BadInput(
            "batch.grain asks for the same bits on any number of processes, and a forward in training moves the buffer"
            f" {bare_name(moved[0])} of the model, on each process by the leaves that it has; leave it as it is"
        )


def _figures(contract: Contract, outputs: dict[str, Any]) -> tuple[str, ...]:
    """Names of the 0-dim outputs, which are logged; the loss itself is in any case."""
    names = [name for name, value in outputs.items() if torch.is_tensor(value) and not value.ndim and name != "loss"]
    for name in names:
        if f"train/{name}" in OWN_FIGURES:
            raise contract.wrong(
                "loss", f"returned the output {name!r}, a figure", "train/… has one of its own: rename it"
            )
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
        raise contract.wrong("load_state_dict", "did not put back what state_dict() gave", "set all of it")


def _uncompiled() -> Any:
    """Compiled parts run as they were written: what is tried here has other shapes than a run."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _random_states(device: torch.device) -> list[Any]:
    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()]  # type: ignore[index,union-attr]
    return states + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def _same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in zip(a, b, strict=True))


@contextmanager
def _undone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Puts back what a forward and a backward leave: gradients, buffers, random states."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    states, numpy_state = _random_states(device), np.random.get_state()
    try:
        yield
    finally:
        reshard(model)
        for parameter in model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer.copy_(before)  # a forward may have put another one there
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(numpy_state)
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[3], device)
