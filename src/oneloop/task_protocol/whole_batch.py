"""Losses over the whole global batch: the task methods ``embed`` and ``batch_loss``."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from oneloop.basics.differences import differences, listed
from oneloop.basics.exit_codes import Inexact

Parts = Mapping[str, Tensor]
Described = dict[str, str]
"""the tensors of a micro-batch by name: a text about shape and dtype of a row"""


def is_whole_batch(task: Any) -> bool:
    """Return whether the task's loss is over the whole global batch."""
    return hasattr(task, "batch_loss")


def columns_of(task: Any, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the entries of a batch that ``batch_loss`` needs."""
    return {name: batch[name] for name in getattr(task, "batch_columns", ())}


def described(tensors: Parts) -> Described:
    """Describe each tensor for :func:`check_alike`."""
    texts = {}
    for name, tensor in tensors.items():
        rows = f"rows of shape {tuple(tensor.shape[1:])}" if tensor.ndim else "0-dim"
        texts[name] = f"{rows} ({tensor.dtype})"
    return texts


def check_alike(tensors: Parts, before: Described, *, samples: int) -> None:
    """Compare the tensors of a micro-batch with those of rank 0's first one.

    Args:
        tensors: its parts and columns.
        before: those of the first micro-batch.
        samples: number of its samples.

    Raises:
        Inexact: names, shapes of rows, or dtypes differ.
    """
    lines = differences(before, described(tensors))
    if lines:
        raise Inexact(
            "the results of embed or collate differ between two micro-batches "
            f"({listed(lines)}); return the same names, dtypes and shapes of rows each time: pad "
            "all rows to one length"
        )
    for name, tensor in tensors.items():
        if tensor.ndim and len(tensor) != samples:
            raise Inexact(
                f"{name!r} has the shape {tuple(tensor.shape)} for {samples} samples; give it one "
                "row per sample"
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
