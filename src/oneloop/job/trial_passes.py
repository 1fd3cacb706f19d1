"""One forward and backward over a few samples before a run; nothing of it is left behind."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import reseed
from oneloop.basics.tensors import as_real, local, reshard
from oneloop.data.step_batches import transferred
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.machine.layout_checks import Checks
from oneloop.measure.flops import Operations
from oneloop.tasks.protocol_checks import Contract, theirs

Samples = list[tuple[int, Any]]  # with their indices


class Wrapped(nn.Module):
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
            why = f"under DDP the model is wrapped, and has no {name!r}"
            raise AttributeError(f"{why}: call model(...), and do what you need in its forward") from None


def batch_of(contract: Contract, job: Job, run: Run, samples: Samples, *, trained: bool = True) -> tuple[Any, float]:
    """These samples on the device, and what they weigh."""
    before = random_states(run.device)
    collated = contract.collated([sample for _, sample in samples])
    contract.draws = contract.draws or drawn_since(before, run.device)
    batch = job.collate.completed(collated, [index for index, _ in samples])
    weight = contract.weight(batch, samples=len(samples), trained=trained)
    return next(transferred(iter([batch]), run.device)), weight


class Pass(NamedTuple):
    """What one forward and backward gave."""

    loss: float
    outputs: dict[str, Any]
    draws: bool
    flops: float
    units: list[str]  # of FSDP2, that ran
    unused: list[str]
    sparse: list[str]  # parameters whose gradient is sparse
    gradients: dict[str, tuple[float, float]]
    """of this rank's share of each parameter's: its sum, and the sum of its absolute values"""


def one_pass(
    contract: Contract, job: Job, run: Run, model: nn.Module, checks: Checks, samples: Samples, *, backward: bool = True
) -> Pass:
    """Forward and backward over these samples, from the same seeds each time."""
    with undone(model, run.device), Operations(modules=run.sharded) as counted:
        reseed(run.device, job.recipe.seed, 0, others=True)
        batch, _ = batch_of(contract, job, run, samples)
        before = random_states(run.device)
        checks.begin()
        loss, outputs = contract.loss(model, batch)
        draws = drawn_since(before, run.device)
        counted.backward = True
        found = theirs(job.task, "loss", lambda: _gradients(loss, model)) if backward else {}
        checks.end()
        gradients = {name: local(gradient) for name, gradient in found.items() if gradient is not None}
        sparse = [name for name, gradient in gradients.items() if gradient.is_sparse]
        sums = {name: _sums(gradient) for name, gradient in gradients.items()}
    units, checks.units.calls = checks.units.calls, []
    unused = [name for name in found if name not in gradients]
    return Pass(float(loss.detach()), outputs, draws, counted.total, units, unused, sparse, sums)


def _gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Of the trained parameters; under DDP without its hooks, which would take this backward for one of its own."""

    def named() -> Iterator[tuple[str, nn.Parameter]]:
        return ((bare_name(name), p) for name, p in model.named_parameters() if p.requires_grad)

    if isinstance(model, Wrapped):
        names, parameters = zip(*named(), strict=True)
        try:
            found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            return dict(zip(names, found, strict=True))
        except RuntimeError as error:
            if "heckpoint" not in str(error):  # reentrant checkpointing allows nothing but backward()
                raise
    loss.backward()
    return {name: parameter.grad for name, parameter in named()}  # those of FSDP2 are sharded again only now


def _sums(gradient: torch.Tensor) -> tuple[float, float]:
    mine = as_real((gradient.coalesce().values() if gradient.is_sparse else gradient).detach())
    wide = torch.float32 if mine.device.type == "mps" else torch.float64
    return float(mine.sum(dtype=wide)), float(torch.linalg.vector_norm(mine, 1, dtype=wide))


def random_states(device: torch.device) -> list[Any]:
    """Of torch's, Python's and numpy's generators."""
    states: list[Any] = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()]  # type: ignore[index,union-attr]
    return states + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def drawn_since(before: list[Any], device: torch.device) -> bool:
    """Whether random numbers were drawn since these states."""
    pairs = zip(before, random_states(device), strict=True)
    return not all(torch.equal(x, y) if torch.is_tensor(x) else x == y for x, y in pairs)


@contextmanager
def undone(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Afterwards all is as it was before."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    states, numpy_state = random_states(device), np.random.get_state()
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
