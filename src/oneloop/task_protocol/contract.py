"""Checks of the task protocol on real samples.

They call each method as a run calls it, and report what is wrong.

>>> contract = Contract(task)
>>> batch = contract.collated(samples)
>>> weight = contract.weight(batch, samples=len(samples))
>>> loss, outputs = contract.loss(model, batch)
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.task_protocol.evaluation_metrics import (
    check_names,
    make_metrics,
    named_values,
    not_logged,
)
from oneloop.task_protocol.user_code import named, theirs
from oneloop.task_protocol.whole_batch import is_whole_batch


class Contract:
    """Calls and checks a task's methods.

    Every method raises BadInput with file, line and method, what it returned and how to fix it.

    Args:
        task: the task.
    """

    def __init__(self, task: Any) -> None:
        self.task = task
        self.whole = is_whole_batch(task)
        """whether the loss is over the whole global batch"""
        self.additive = bool(getattr(task, "additive", True)) and not self.whole
        """whether the task declares that the loss of a batch is the sum of its samples' losses"""
        self._keys: list[str] | None = None

    def call(self, member: str, *given: Any) -> Any:
        """Return the result of a method.

        Args:
            member: its name.
            given: its arguments.
        """
        return theirs(self.task, member, partial(getattr(self.task, member), *given))

    def wrong(self, member: str, returned: str, fix: str) -> BadInput:
        """Return the error for a method that returned something wrong.

        Args:
            member: name of the method.
            returned: what it returned; continues the method's name.
            fix: what to do about it.
        """
        return BadInput(f"{named(self.task, member)} {returned}; {fix}")

    def state(self) -> Any:
        """Return the task's state_dict() as it is after a checkpoint (JSON) round trip."""
        state = self.call("state_dict")
        try:
            if not isinstance(state, dict):
                raise TypeError(f"{_describe(state)} is not a dict")
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise self.wrong(
                "state_dict",
                f"cannot be saved as it is ({error})",
                "return a dict of numbers, texts, lists and dicts; tensors belong into buffers of "
                "the model",
            ) from None

    def collated(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch; check that it is a dict with the same keys in every call."""
        batch = self.call("collate", list(samples))
        if not isinstance(batch, dict) or not all(isinstance(name, str) for name in batch):
            raise self.wrong(
                "collate", f"returned {_describe(batch)}", "return a dict of tensors by name"
            )
        keys = sorted(batch)
        if self._keys is not None and keys != self._keys:
            raise self.wrong(
                "collate",
                f"returned the keys {', '.join(keys)} for {len(samples)} samples, "
                f"{', '.join(self._keys)} before",
                "return the same keys each time",
            )
        self._keys = keys
        return batch

    def weight(self, batch: Mapping[str, Any], *, samples: int, trained: bool = True) -> float:
        """Return the weight of a batch.

        Args:
            batch: a batch of ``collate``.
            samples: number of its samples.
            trained: it is for training: check its weight against ``sample_weight``.
        """
        fix = (
            "return a 0-dim tensor on the host: the number of samples or target tokens in the batch"
        )
        result = self.call("weight", batch)
        if not isinstance(result, Tensor) or result.ndim:
            raise self.wrong("weight", f"returned {_describe(result)}", fix)
        weight = float(result)
        if not 0 <= weight < math.inf:
            raise self.wrong("weight", f"returned {weight}", "a weight is finite and never below 0")
        each = getattr(self.task, "sample_weight", None)
        if trained and each is not None and not math.isclose(weight, each * samples, rel_tol=1e-6):
            raise self.wrong(
                "weight",
                f"returned {weight:g} for {samples} samples, but sample_weight is {each:g}",
                "remove sample_weight, or return the same value from weight",
            )
        return weight

    def loss(self, model: Any, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return the summed loss and the outputs.

        A whole-batch loss is computed for this batch on its own.
        """
        member = "batch_loss" if self.whole else "loss"
        return self._loss(member, partial(self.task.loss, model, batch))

    def batch_loss(self, parts: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> Tensor:
        """Return the summed loss of a whole batch."""
        return self._loss("batch_loss", partial(self.task.batch_loss, parts, columns))[0]

    def _loss(self, member: str, call: Callable[[], Any]) -> tuple[Tensor, dict[str, Any]]:
        fix = (
            "return (loss, outputs): the SUM of the losses as a 0-dim tensor, and a dict of "
            "detached tensors"
        )

        # Check the types.
        result = theirs(self.task, member, call)
        if not isinstance(result, tuple) or len(result) != 2:
            raise self.wrong(member, f"returned {_describe(result)}", fix)
        loss, outputs = result
        if not isinstance(loss, Tensor) or loss.ndim or not loss.is_floating_point():
            raise self.wrong(member, f"returned {_describe(loss)} as the loss", fix)
        if outputs is not None and not isinstance(outputs, Mapping):
            raise self.wrong(member, f"returned {_describe(outputs)} as the outputs", fix)

        # Check that it can be trained.
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise self.wrong(
                member,
                "returned a loss without a gradient in training",
                "compute it from the model's outputs, without detach(), .item() or torch.no_grad()",
            )
        return loss, dict(outputs or {})

    def check_metrics(
        self, made_by: str, updated_by: str, device: torch.device, *given: Any
    ) -> list[str]:
        """Make metrics, update them, and check what they compute.

        Args:
            made_by: the method that makes the metrics.
            updated_by: the one that updates them.
            device: of the metrics.
            given: arguments of the update after the metrics.

        Returns:
            Lines about values that are neither logged nor drawn.
        """
        metrics = theirs(self.task, made_by, partial(make_metrics, self.task, made_by, device))
        self.call(updated_by, metrics, *given)
        try:
            computed = metrics.compute()
        except Exception:
            return []  # a few samples may not suffice
        values = named_values(metrics, computed)  # raises ValueError if a value is not a number
        check_names(values, made_by)
        return not_logged(values)


def _describe(value: Any) -> str:
    """Return what a value is, for a message."""
    if isinstance(value, Tensor):
        shape = "0-dim" if not value.ndim else f"of shape {tuple(value.shape)}"
        return f"a tensor {shape}, {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None:
        return "None"
    return f"a {type(value).__name__}"
