"""Try an optimizer on a toy model: does its state survive a checkpoint, and FSDP2's sharding?

>>> tried = try_optimizer(lambda toy: MyOptimizer(toy.parameters(), lr=0.1), parameter)
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from oneloop.basics.content_hash import content_hash
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import one_line
from oneloop.basics.optimizer_tensors import optimizer_tensors
from oneloop.basics.seeds import random_states, reseed, restored_generators
from oneloop.basics.tensors import plain_optimizer
from oneloop.basics.wide_sums import wide_dtype
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.optimizer_values import optimizer_values, settings_of

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
        closure: whether a step gets a closure if it needs one.
    """

    def __init__(
        self,
        make: Callable[[nn.Module], Optimizer],
        like: Tensor,
        *,
        sharded: bool = False,
        closure: bool = False,
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

        # Some optimizers need a closure that returns the loss.
        needed = inspect.signature(self.optimizer.step).parameters.get("closure")
        self._closures: list[Callable[[], float]] = []
        if closure and needed is not None and needed.default is needed.empty:
            self._closures = [float]
        self.drew = False
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

            # Find out which generators the step draws from.
            reseed(self._device, step, others=True)
            before = random_states(self._device)
            self.optimizer.step(*self._closures)
            after = random_states(self._device)
            self.drew |= before != after
            self.draws_others |= before[1] != after[1]
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
    """Make ten steps on a toy model, and repeat the last five from a checkpoint.

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
        # Train one toy without a stop, and save it after half of its steps.
        try:
            toy = _Toy(make, like, closure=scheduled is None)
            settings = None if scheduled is None else settings_of(toy.optimizer, scheduled)
            toy.train(1, _SAVED)
        except BadInput:
            raise
        except Exception as error:
            raise NotTried(
                "an optimizer was not tried on a small model, so whether a resume is exact is not "
                f"known ({type(error).__name__}: {one_line(error)})"
            ) from error
        alone = SimpleNamespace(
            process_index=0, local_process_index=0, num_processes=1, device=like.device
        )
        with TemporaryDirectory() as folder:
            accelerator = cast(Accelerator, alone)
            checkpoints = Checkpoints(Path(folder), accelerator, settings=settings, sync=True)
            problem = checkpoints.save(_SAVED, toy.model, toy.optimizer, {})
            if problem:
                raise OSError(problem)
            expected = toy.train(_SAVED + 1, _STEPS)

            # Train a second toy from the checkpoint.
            resumed = _Toy(make, like, closure=scheduled is None)
            path = checkpoints.store.sealed()[-1]
            checkpoints.load(path, resumed.model, resumed.optimizer)
        seen = resumed.train(_SAVED + 1, _STEPS)

    if content_hash(seen) != content_hash(expected):
        raise ValueError(
            f"{_kind(toy)} has state that a checkpoint does not hold: in a trial on a small "
            "model the steps after a resume are others; keep state in param_groups or in "
            "state[parameter], or return it from state_dict() and take it in load_state_dict()"
        )
    return Tried(_share(toy), toy.draws_others)


def _share(toy: _Toy) -> float:
    """Return the elements of the state per parameter, without numbers such as the step."""
    tensors = optimizer_tensors(toy.model, toy.optimizer).values()
    elements = sum(tensor.numel() for tensor in tensors if tensor.ndim)
    return elements / sum(parameter.numel() for parameter in toy.model.parameters())


def _kind(toy: _Toy) -> str:
    return type(plain_optimizer(toy.optimizer)).__name__


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
                f"{_kind(sharded)} cannot update float64 shards of unequal size, of which one may "
                f"be empty ({type(error).__name__}: {one_line(error)}); {_UNDER_FSDP2}"
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
        draws = "; it draws random numbers in step()" if whole.drew else ""
        raise ValueError(
            f"the updates of {_kind(whole)} depend on the shards of parameters: {found}{draws}; "
            f"{_UNDER_FSDP2}"
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
