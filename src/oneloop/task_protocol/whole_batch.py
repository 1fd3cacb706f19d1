"""Losses over the whole global batch: the task methods ``embed`` and ``batch_loss``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from oneloop.basics.exit_codes import Inexact

Parts = Mapping[str, Tensor]
Described = dict[str, tuple[str, tuple[int, ...]]]
"""the tensors of a micro-batch by name: a text about shape and dtype of a row, and the shape"""


def is_whole_batch(task: Any) -> bool:
    """Return whether the task's loss is over the whole global batch."""
    return hasattr(task, "batch_loss")


def columns_of(task: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries of a batch that ``batch_loss`` needs."""
    return {name: batch[name] for name in getattr(task, "batch_columns", ())}


def described(tensors: Parts) -> Described:
    """Describe each tensor for :func:`check_alike`."""
    found = {}
    for name, tensor in tensors.items():
        rows = f"rows of shape {tuple(tensor.shape[1:])}" if tensor.ndim else "0-dim"
        found[name] = f"{rows} ({tensor.dtype})", tuple(tensor.shape)
    return found


def check_alike(found: Described, before: Described, *, samples: int) -> None:
    """Compare the tensors of a micro-batch with those of rank 0's first one.

    Args:
        found: its parts and columns.
        before: those of the first micro-batch.
        samples: number of its samples.

    Raises:
        Inexact: names, shapes of rows, or dtypes differ.
    """
    for name, (rows, shape) in found.items():
        if name not in before:
            raise Inexact(
                f"the result of embed has {name!r}, which it did not have before; return the "
                "same names each time"
            )
        if rows != before[name][0]:
            raise Inexact(
                f"{name!r} is {rows} in one micro-batch, but {before[name][0]} in another; they "
                "must not depend on the batch: pad all rows to one length"
            )
        if shape and shape[0] != samples:
            raise Inexact(
                f"{name!r} has the shape {shape} for {samples} samples; give it one row per sample"
            )
    for name in before:
        if name not in found:
            raise Inexact(
                f"the result of embed lacks {name!r}, which it had before; return the same names "
                "each time"
            )


def loss_alone(
    task: Any, model: nn.Module, batch: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and outputs of a batch that is the whole global batch.

    The outputs contain the detached parts.
    """
    parts = task.embed(model, batch)
    loss, outputs = task.batch_loss(parts, columns_of(task, batch))
    detached = {name: part.detach() for name, part in parts.items()}
    return loss, {**detached, **(outputs or {})}
