"""Losses over the whole global batch: the task methods ``embed`` and ``batch_loss``.

This module also checks what they return.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.basics.wide_sums import on_host
from oneloop.task_protocol.protocol_checks import Contract, theirs

Parts = Mapping[str, Tensor]
Described = dict[str, tuple[str, tuple[int, ...]]]
"""the tensors of a micro-batch by name: a text about shape and dtype of a row, and the shape"""

_PARTS = "return a dict of tensors: each has one row per sample, or is 0-dim"
_COPIES = 4  # samples of the smaller batch in the check for a mean


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


def parts_of(
    contract: Contract, model: nn.Module, batch: Mapping[str, Any], samples: int
) -> dict[str, Tensor]:
    """Return the checked result of ``embed``.

    Args:
        contract: checks of the task.
        model: the model.
        batch: a batch of ``collate``.
        samples: number of its samples.

    Raises:
        BadInput: parts or columns are not rows per sample.
    """
    task = contract.task
    versions = {name: value._version for name, value in batch.items() if isinstance(value, Tensor)}
    parts = theirs(task, "embed", lambda: task.embed(model, batch))
    for name, version in versions.items():
        if batch[name]._version != version:
            raise contract.wrong(
                "embed", f"changes {name!r} of the batch in place", "it runs twice: copy it first"
            )

    # Check that the parts are rows, or 0-dim.
    is_dict = isinstance(parts, Mapping) and len(parts) > 0
    if not is_dict or not all(isinstance(part, Tensor) for part in parts.values()):
        raise contract.wrong("embed", f"returned a {type(parts).__name__}", _PARTS)
    for name, part in parts.items():
        if part.ndim and len(part) != samples:
            found = f"returned {name!r} of shape {tuple(part.shape)} for {samples} samples"
            raise contract.wrong("embed", found, f"{_PARTS} (use reshape(()))")
        if part.is_complex():
            raise contract.wrong(
                "embed", f"returned {name!r}, which is complex", "return torch.view_as_real of it"
            )

    # Check that the columns are rows.
    for name in getattr(task, "batch_columns", ()):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.ndim and len(value) == samples:
            continue
        if value is None:
            found = ", ".join(batch)
        else:
            found = f"for it a {type(value).__name__}"
        raise contract.wrong(
            "batch_columns",
            f"names {name!r}, but collate returned {found} for {samples} samples",
            'name tensors with one row per sample: ("label",)',
        )
    return dict(parts)


def check_rows(
    contract: Contract,
    together: tuple[Parts, Parts],
    alone: Sequence[Parts],
    again: Parts,
    tolerance: float,
) -> None:
    """Check that the parts of a sample do not depend on the other samples of its batch.

    Args:
        contract: checks of the task.
        together: the parts of several samples, in this order and in the reverse order.
        alone: the parts of each of these samples alone.
        again: those of the first sample, computed once more.
        tolerance: relative tolerance for rounding.

    Raises:
        BadInput: they depend on them.
    """
    for name, part in together[0].items():
        # A 0-dim part has no rows: each sample gets the whole.
        other = together[1][name]
        if part.ndim:
            found = [*part]
            back = [*other]
            rows = [one[name][0] for one in alone]
        else:
            found = [part] * len(alone)
            back = [other] * len(alone)
            rows = [one[name] for one in alone]
        for row in rows:
            if part.ndim and row.shape != part.shape[1:]:
                raise contract.wrong(
                    "embed",
                    f"returned {name!r} with rows of shape {tuple(part.shape[1:])} for "
                    f"{len(part)} samples, and {tuple(row.shape)} for one",
                    "let all rows have one shape",
                )
        if _same(found, rows, tolerance) and _same(back, rows[::-1], tolerance):
            continue

        # Find out why they differ.
        if not _same([alone[0][name]], [again[name]], tolerance):
            problem = "has other values for the same sample the next time"
            fix = "use torch's global generator"
        elif not part.ndim:
            some = ", ".join(f"{float(value):.6g}" for value in rows[:3])
            problem = f"is 0-dim, but depends on the batch: {some}"
            fix = "give it one row per sample"
        elif all(any(_same([row], [other], tolerance) for other in rows) for row in found):
            problem = "has its rows in another order than the batch"
            fix = "keep the order of the samples"
        elif _same(found, back, 0.0):
            problem = "does not depend on the batch"
            fix = "return a row for each sample, computed from this sample"
        else:
            problem = "depends on the other samples of the batch"
            fix = (
                "another parallel layout would train a different model: compute each row from its "
                "sample only"
            )
        raise contract.wrong("embed", f"returned {name!r}, which {problem}", fix)


def check_loss(contract: Contract, parts: Parts, columns: Parts) -> None:
    """Check that ``batch_loss`` uses no parameter, and is not a mean.

    Args:
        contract: checks of the task.
        parts: result of ``embed`` for a batch.
        columns: entries of this batch that ``batch_columns`` names.

    Raises:
        BadInput: it does, or it is.
    """
    # Call it without and with gradients.
    try:
        with torch.no_grad():
            contract.batch_loss(parts, columns)
        with torch.enable_grad():
            loss_of_parts = contract.task.batch_loss(parts, columns)[0]
    except BadInput as error:
        if not isinstance(error.__cause__, KeyError):
            raise
        raise BadInput(
            f"{error}; the result of embed has {', '.join(parts)}; batch_columns names "
            f"{', '.join(columns) or 'nothing'}"
        ) from error
    if loss_of_parts.requires_grad:
        fix = "return it from embed as a 0-dim tensor; otherwise it would get no gradient"
        raise contract.wrong("batch_loss", "uses a parameter of the model", fix)

    def loss(copies: int) -> float:
        """Return the loss of a batch with so many copies of the first row."""
        constant = {}
        for name, part in parts.items():
            constant[name] = part[:1].expand(copies, *part.shape[1:]) if part.ndim else part
        tiled = {}
        for name, column in columns.items():
            at = torch.arange(copies) % min(_COPIES, len(column))
            tiled[name] = column[at.to(column.device)]
        return float(contract.batch_loss(constant, tiled))

    # If all embeddings are equal, a sum over twice as many samples is at least twice as large: with
    # more others, the terms of a sample do not get smaller.
    with torch.no_grad():
        once = loss(_COPIES)
        twice = loss(2 * _COPIES)
    if math.isfinite(once + twice) and once > 0 and twice < 2 * once * (1 - 1e-3):
        found = (
            f"returned {once:.6g} for {_COPIES} equal embeddings and {twice:.6g} for {2 * _COPIES} "
            "of them"
        )
        fix = (
            "that is a mean: return the SUM over samples (reduction='sum'); the loop divides once, "
            "by the weight"
        )
        raise contract.wrong("batch_loss", found, fix)


def _same(some: Sequence[Tensor], others: Sequence[Tensor], tolerance: float) -> bool:
    """Whether the tensors are equal up to the tolerance."""
    pairs = [(on_host(a), on_host(b)) for a, b in zip(some, others, strict=True)]
    return all(apart(a, b) <= tolerance for a, b in pairs)


def apart(some: Tensor, others: Tensor) -> Tensor:
    """Return the largest difference of two tensors, relative to their largest finite value, 0-dim.

    Two values that are not finite are equal; the difference is infinite if only one of them is
    finite.
    """
    if not some.numel():
        return torch.zeros((), device=some.device)
    if not some.is_floating_point():
        some = some.float()
    if not others.is_floating_point():
        others = others.float()
    alike = torch.where(some.isfinite() == others.isfinite(), 0.0, torch.inf)
    both_finite = some.isfinite() & others.isfinite()
    difference = torch.where(both_finite, (some - others).abs(), alike)
    size = torch.maximum(_largest(some), _largest(others))
    return (difference.max() / size).float().nan_to_num(0.0, torch.inf)


def _largest(values: Tensor) -> Tensor:
    """Return the largest absolute value that is finite, 0-dim."""
    return values.nan_to_num(0.0, 0.0, 0.0).abs().max()
