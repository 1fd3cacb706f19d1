"""Check before a run that an embedding depends on its sample only, not on others of the batch.

It is checked in eval mode, and in training mode without random draws.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.seeds import has_drawn, random_states
from oneloop.basics.wide_sums import on_host
from oneloop.checks.contract import Contract
from oneloop.checks.dry_run import DryRun
from oneloop.checks.modes import without_draws
from oneloop.checks.tolerance import limits_of, tolerance_of
from oneloop.data.step_batches import Batch
from oneloop.evaluation import evaluating
from oneloop.task_protocol.user_code import theirs
from oneloop.task_protocol.whole_batch import Parts, columns_of

_PARTS = "return a dict of tensors: each has one row per sample, or is 0-dim"
_COPIES = 4  # samples of the smaller batch in the check for a mean


class _Rows(NamedTuple):
    """Embeddings of the same samples."""

    together: Parts
    reverse: Parts  # in the reverse order
    again: Parts  # of the first sample
    copies: Parts  # of the first sample, as often as there are samples
    alone: Sequence[Parts]  # of each sample
    columns: dict[str, Tensor]
    draws: bool  # whether random numbers were drawn


def check_rows(dry: DryRun) -> None:
    """Check ``embed`` and ``batch_loss``. Collective under FSDP2: call on every rank.

    Raises:
        BadInput: an embedding depends on other samples, or the loss is wrong.
    """
    with evaluating(dry.model):
        rows = _embedded(dry)
        if not rows.draws:
            _compare(dry, rows)
        _check_loss(dry.contract, rows.together, rows.columns)
    compute = partial(_embedded, dry)
    _check_passes(dry)
    with torch.no_grad(), without_draws(dry.model, dry.root, compute) as (trained, _):
        if trained is not None:
            _compare(dry, trained)


def _check_passes(dry: DryRun) -> None:
    """Check that both passes of a step get the same parts, whatever is drawn."""
    results = []
    for seed, gradients in ((0, False), (0, True), (1, False)):
        batch, _ = dry.batch(range(dry.number), seed=seed)
        with torch.set_grad_enabled(gradients):
            results.append(parts_of(dry.contract, dry.model, batch))
    first, second, other = results
    tolerance = tolerance_of(dry.job, dry.run, dry.model)
    for name, part in first.items():
        if _apart([part], [second[name]]) > tolerance:
            raise dry.contract.wrong(
                "embed",
                f"returned {name!r} with other values for the same micro-batch and random numbers",
                "it runs twice, without gradients and with them: use torch's global generator",
            )
        if not part.ndim and _apart([part], [other[name]]) > tolerance:
            raise dry.contract.wrong(
                "embed",
                f"returned {name!r}, which is 0-dim and differs between micro-batches",
                "give it one row per sample",
            )


def _embedded(dry: DryRun) -> _Rows:
    """Embed the samples in both orders, and alone."""
    samples = range(dry.number)
    several = [samples, samples[::-1], [0], [0] * dry.number]
    single = [[at] for at in samples]
    batches = [dry.batch(numbers)[0] for numbers in [*several, *single]]
    before = random_states(dry.run.device)
    together, reverse, again, copies, *alone = (
        parts_of(dry.contract, dry.model, batch) for batch in batches
    )
    draws = has_drawn(before, dry.run.device) or dry.contract.draws
    columns = columns_of(dry.job.task, batches[0])
    return _Rows(together, reverse, again, copies, alone, columns, draws)


def parts_of(contract: Contract, model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return the checked result of ``embed``.

    Args:
        contract: checks of the task.
        model: the model.
        batch: the batch, with the indices of its samples.

    Raises:
        BadInput: parts or columns are not rows per sample.
    """
    task = contract.task
    samples = len(batch["index"])
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


def _compare(dry: DryRun, found: _Rows) -> None:
    """Check that the parts of a sample do not depend on the other samples of its batch.

    Raises:
        BadInput: they depend on them.
    """
    number = dry.number
    for name, part in found.together.items():
        together = _rows(part, number)
        reverse = _rows(found.reverse[name], number)
        copies = _rows(found.copies[name], number)
        [again] = _rows(found.again[name], 1)
        alone = [_rows(one[name], 1)[0] for one in found.alone]
        for row in alone:
            if row.shape != together[0].shape:
                raise dry.contract.wrong(
                    "embed",
                    f"returned {name!r} with rows of shape {tuple(part.shape[1:])} for "
                    f"{number} samples, and {tuple(row.shape)} for one",
                    "let all rows have one shape",
                )

        # The control: the first sample again, and in a batch of its copies.
        limits = limits_of(dry.job, dry.run, dry.model)
        noise = max(_apart(alone[:1], [again]), _apart(copies, alone[:1] * number))
        most = tolerance_of(dry.job, dry.run, dry.model)
        limit = limits._replace(most=most).allow(noise)
        if max(_apart(together, alone), _apart(reverse, alone[::-1])) <= limit:
            continue

        # Find out why they differ.
        if _apart(alone[:1], [again]) > limit:
            problem = "has other values for the same sample the next time"
            fix = "use torch's global generator"
        elif not part.ndim:
            some = ", ".join(f"{float(value):.6g}" for value in alone[:3])
            problem = f"is 0-dim, but depends on the batch: {some}"
            fix = "give it one row per sample"
        elif all(any(_apart([row], [other]) <= limit for other in alone) for row in together):
            problem = "has its rows in another order than the batch"
            fix = "keep the order of the samples"
        elif _apart(together, reverse) == 0:
            problem = "does not depend on the batch"
            fix = "return a row for each sample, computed from this sample"
        else:
            problem = "depends on the other samples of the batch"
            fix = (
                "another parallel layout would train a different model: compute each row from its "
                "sample only"
            )
        raise dry.contract.wrong("embed", f"returned {name!r}, which {problem}", fix)


def _rows(part: Tensor, number: int) -> list[Tensor]:
    """Return the row of each sample. A 0-dim part has none: each sample gets the whole."""
    return [*part] if part.ndim else [part] * number


def _apart(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the largest difference of two rows, relative to their largest finite value.

    Two values that are not finite are equal; the difference is infinite if only one is finite.
    """
    a, b = (on_host(torch.stack([*rows])) for rows in (some, others))
    if not a.numel():
        return 0.0
    difference = torch.where(a.isfinite() | b.isfinite(), (a - b).abs(), 0.0)
    size = torch.maximum(a.abs(), b.abs()).nan_to_num(0.0, 0.0)
    relative = _largest(difference.nan_to_num(torch.inf)) / _largest(size)
    return float(relative.nan_to_num(0.0).max())


def _largest(rows: Tensor) -> Tensor:
    """Return the largest value of each row."""
    return rows.reshape(len(rows), -1).amax(1)


def _check_loss(contract: Contract, parts: Parts, columns: Parts) -> None:
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
