"""Try an optimizer on a toy model: does its state survive a checkpoint, and FSDP2's sharding?

>>> tried = try_optimizer(lambda toy: MyOptimizer(toy.parameters(), lr=0.1), parameter)
"""

import inspect
import json
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.content_hash import content_hash
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import one_line
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.seeds import random_states, reseed, restored_generators
from oneloop.basics.tensors import kinds_of, plain_optimizer
from oneloop.basics.wide_sums import wide_dtype
from oneloop.checkpoint.optimizer_values import (
    load_values,
    optimizer_targets,
    optimizer_values,
    settings_of,
)
from oneloop.checkpoint.state_dict import described

_STEPS = 10
_SAVED = 5  # step of the checkpoint
_UNDER_FSDP2 = (
    "under FSDP2 each rank sees its shard only: use elementwise updates, or DTensor's own norms"
)
_ROUNDING = 1e-9  # relative difference between shards and whole tensors in float64


class NotTried(Exception):
    """An optimizer cannot train a small model; its cause is the error."""


@dataclass(frozen=True)
class Tried:
    """What a trial has found out."""

    share: float = 2.0  # elements of optimizer state per parameter, approximately; 2: as Adam
    draws_others: bool = False  # whether a step draws from Python's or numpy's generator
    notes: Sequence[str] = ()  # why the optimizer could not be tried


class _Toy:
    """A small model with its optimizer, whose gradients depend on the step only.

    Args:
        make: builds the optimizer of a model.
        like: a parameter of the real model, with its device.
        sharded: whether to shard the toy as that parameter; one shard is smaller, and one is empty.
    """

    def __init__(
        self,
        make: Callable[[nn.Module], Optimizer],
        like: Tensor,
        *,
        sharded: bool = False,
    ) -> None:
        # Build the model, the same each time. With n ranks, n + 1 rows make unequal shards.
        self._device = like.device
        self._like = like if sharded and isinstance(like, DTensor) else None
        ranks = like.device_mesh.size() if isinstance(like, DTensor) else 1
        reseed(self._device, 0)
        layers = [nn.Linear(3, ranks + 1), nn.Linear(ranks + 1, 1)]
        self.model = nn.Sequential(*layers).to(self._device, wide_dtype(self._device))
        for layer in layers:
            for name, parameter in [*layer.named_parameters()]:
                setattr(layer, name, nn.Parameter(self._sharded(parameter.detach())))

        # Build the optimizer. One with two sets of weights trains them in train mode.
        self.optimizer = make(self.model)
        getattr(self.optimizer, "train", lambda: None)()
        self.draws_others = False

    def _sharded(self, tensor: Tensor) -> Tensor:
        if self._like is None:
            return tensor
        from torch.distributed.tensor import distribute_tensor

        # Each rank has the whole tensor: nothing is sent.
        return distribute_tensor(
            tensor, self._like.device_mesh, self._like.placements, src_data_rank=None
        )

    def train(self, first: int, last: int) -> list[Tensor]:
        """Make the steps from ``first`` to ``last``; return all parameters after each of them."""
        seen = []
        for step in range(first, last + 1):
            reseed(self._device, step)
            for parameter in self.model.parameters():
                gradient = torch.randn(parameter.shape, device=self._device, dtype=parameter.dtype)
                parameter.grad = self._sharded(gradient)

            # Find out whether the step draws from Python's or numpy's generator.
            reseed(self._device, step, others=True)
            _, before, *_ = random_states(self._device)
            self.optimizer.step()
            _, after, *_ = random_states(self._device)
            self.draws_others |= before != after
            for parameter in self.model.parameters():
                seen.append(_whole(parameter).clone())
        return seen


def _whole(parameter: Tensor) -> Tensor:
    """Return all values of a parameter. Collective for a DTensor."""
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def try_optimizer(
    make: Callable[[nn.Module], Optimizer], like: Tensor, scheduled: Collection[str] | None = None
) -> Tried:
    """Make ten steps on a toy model, and repeat the last five from what a checkpoint holds.

    Args:
        make: builds the optimizer of a model.
        like: a tensor on the device to try it on.
        scheduled: names of entries of parameter groups that a loop sets before each step; None:
            a checkpoint holds all entries.

    Returns:
        What it has found out.

    Raises:
        NotTried: the optimizer cannot be built, or cannot update the toy model.
        ValueError: a checkpoint cannot hold its state, or the steps after a load are others.
    """
    with restored_generators(like.device):
        # Train one toy for half of its steps.
        try:
            toy = _Toy(make, like)
            settings = None if scheduled is None else settings_of(toy.optimizer, scheduled)
            toy.train(1, _SAVED)
        except BadInput:
            raise
        except Exception as error:
            raise NotTried(
                "an optimizer was not tried on a small model, so whether a resume is exact is not "
                f"known ({type(error).__name__}: {one_line(error)})"
            ) from error

        # Copy all that a checkpoint would hold, and train it to the end.
        weights = deepcopy(toy.model.state_dict())
        described(optimizer_tensors(toy.model, toy.optimizer))
        values = json.dumps(optimizer_values(toy.model, toy.optimizer, settings=settings))
        tensors = deepcopy(optimizer_tensors(toy.model, toy.optimizer))
        expected = toy.train(_SAVED + 1, _STEPS)

        # Train a second toy from there.
        resumed = _Toy(make, like)
        resumed.model.load_state_dict(weights)
        saved = {
            name: SimpleNamespace(size=tensor.shape, properties=tensor)
            for name, tensor in tensors.items()
        }
        targets = optimizer_targets(resumed.model, resumed.optimizer, saved)
        for name, target in targets.items():
            target.copy_(tensors[name])
        load_values(json.loads(values), resumed.model, resumed.optimizer, targets)
        seen = resumed.train(_SAVED + 1, _STEPS)

    if content_hash(seen) != content_hash(expected):
        raise ValueError(
            f"{kinds_of(toy.optimizer)[0]} has state that a checkpoint does not hold: in a trial "
            "on a small model the steps after a resume are others; keep state in param_groups or "
            "in state[parameter], or return it from state_dict() and take it in load_state_dict()"
        )

    # Count the elements of the state per parameter, without numbers such as the step.
    elements = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim)
    parameters = sum(parameter.numel() for parameter in toy.model.parameters())
    return Tried(elements / parameters, toy.draws_others)


def try_shards(
    make: Callable[[nn.Module], Optimizer], like: Tensor, scheduled: Collection[str] | None = None
) -> None:
    """Make ten steps on the shards of a toy model, as FSDP2 does, and on the whole model.

    Collective: call on every rank.

    Args:
        make: builds the optimizer of a model.
        like: a parameter of the real model, with its device and sharding.
        scheduled: as for :func:`try_optimizer`.

    Raises:
        ValueError: the steps on shards are others.
    """
    with restored_generators(like.device):
        whole = _Toy(make, like)
        whole.train(1, _STEPS)
        sharded = _Toy(make, like, sharded=True)
        settings = None if scheduled is None else settings_of(sharded.optimizer, scheduled)
        try:
            sharded.train(1, _STEPS)
        except Exception as error:
            raise ValueError(
                f"{kinds_of(sharded.optimizer)[0]} cannot update float64 shards of unequal size, "
                f"of which one may be empty ({type(error).__name__}: {one_line(error)}); "
                f"{_UNDER_FSDP2}"
            ) from error

    # Compare the weights.
    found = ""
    pairs = zip(sharded.model.parameters(), whole.model.parameters(), strict=True)
    for one, other in pairs:
        expected = _whole(other)
        distance = (_whole(one) - expected).abs().max() / expected.abs().max()
        if not distance <= _ROUNDING:
            found = f"ten steps on shards end {distance:.1e} away from those on whole tensors"

    # Compare what is not sharded, of which a checkpoint holds rank 0's.
    own: dict[str, Any] = optimizer_values(sharded.model, sharded.optimizer, settings=settings)
    for name, tensor in optimizer_tensors(sharded.model, sharded.optimizer).items():
        if not isinstance(tensor, DTensor):
            own[name] = tensor.tolist()
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, own)
    for name in own:
        if not found and any(report[name] != own[name] for report in reports):
            found = f"its {name} differ between the ranks"
    if found:
        raise ValueError(
            f"the updates of {kinds_of(whole.optimizer)[0]} depend on the shards of parameters: "
            f"{found}; {_UNDER_FSDP2}"
        )


def of_kind(optimizer: Optimizer, model: nn.Module) -> Optimizer:
    """Return another optimizer of the same class, with the same defaults, of another model."""
    optimizer = plain_optimizer(optimizer)
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    make = partial(kind, model.parameters())
    for name, value in optimizer.defaults.items():
        if name in accepted:
            make.keywords[name] = deepcopy(value)
    if "model" in accepted:
        make.keywords["model"] = model
    made: Optimizer = make()
    return made
