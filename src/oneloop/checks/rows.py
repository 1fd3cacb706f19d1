"""Check before a run that an embedding depends on its sample only, not on others of the batch.

It is checked in eval mode, and in training mode without random draws.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.checks.dry_run import DryRun
from oneloop.checks.modes import without_draws
from oneloop.checks.tolerance import apart
from oneloop.data.step_batches import Batch
from oneloop.evaluation import evaluating
from oneloop.task_protocol.contract import Contract
from oneloop.task_protocol.whole_batch import Parts, columns_of

_PARTS = "return a dict of tensors: each has one row per sample, or is 0-dim"
_COPIES = 4  # samples of the smaller batch in the check for a mean


def check_rows(dry: DryRun) -> None:
    """Check ``embed`` and ``batch_loss``. Collective under FSDP2: call on every rank.

    Raises:
        BadInput: an embedding depends on other samples, or the loss is wrong.
    """
    with evaluating(dry.model):
        batches = _embed_each_way(dry)
        if not (dry.drew() or dry.found.collate_draws):
            _compare(dry, batches)
    _check_passes(dry)
    with without_draws(dry, partial(_embed_each_way, dry)) as (trained, _):
        if not (trained is None or dry.found.collate_draws):
            _compare(dry, trained)


def _check_passes(dry: DryRun) -> None:
    """Check that both passes of a step get the same parts, whatever is drawn."""
    results = []
    for seed, gradients in ((0, False), (0, True), (1, False)):
        batch = dry.batch(dry.samples, seed=seed)
        with torch.set_grad_enabled(gradients):
            results.append(parts_of(dry, batch))
    first, second, other = results
    _check_loss(dry.contract, other, columns_of(dry.job.task, batch))
    tolerance = dry.rounding.tolerance
    for name, part in first.items():
        if apart([part], [second[name]]) > tolerance:
            raise dry.contract.wrong(
                "embed",
                f"returned {name!r} with other values for the same micro-batch and random numbers",
                "it runs twice, without gradients and with them: use torch's global generator",
            )
        if not part.ndim and apart([part], [other[name]]) > tolerance:
            raise dry.contract.wrong(
                "embed",
                f"returned {name!r}, which is 0-dim and differs between micro-batches",
                "give it one row per sample",
            )


@torch.no_grad()
def _embed_each_way(dry: DryRun) -> list[Parts]:
    """Embed the samples together, in reverse order, the first one in copies, and each alone.

    The last batch is the first sample once more. A 0-dim part becomes equal rows.
    """
    samples = [*dry.samples]
    batches = [samples, samples[::-1], [0] * len(samples)]
    batches += [[at] for at in samples]
    batches.append([0])
    results: list[Parts] = []
    for numbers in batches:
        parts = parts_of(dry, dry.batch(numbers))
        rows = {}
        for name, part in parts.items():
            rows[name] = part if part.ndim else part.expand(len(numbers))
        results.append(rows)
    return results


def parts_of(dry: DryRun, batch: Batch) -> Parts:
    """Return the checked result of ``embed``.

    Args:
        dry: the dry run.
        batch: of its samples.

    Raises:
        BadInput: parts or columns are not rows per sample.
    """
    contract = dry.contract
    samples = len(batch["index"])
    versions = {name: value._version for name, value in batch.items() if isinstance(value, Tensor)}
    parts: Parts = contract.call("embed", dry.model, batch)
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
    for name in getattr(contract.task, "batch_columns", ()):
        value = batch.get(name)
        if isinstance(value, Tensor) and value.ndim and len(value) == samples:
            continue
        raise contract.wrong(
            "batch_columns",
            f"names {name!r}, but the result of collate has no tensor of this name with {samples} "
            f"rows for {samples} samples (it has {', '.join(batch)})",
            'name tensors with one row per sample: ("label",)',
        )
    return parts


def _compare(dry: DryRun, batches: Sequence[Parts]) -> None:
    """Check that the parts of a sample do not depend on the other samples of its batch.

    Args:
        dry: the dry run.
        batches: results of :func:`_embed_each_way`.

    Raises:
        BadInput: they depend on them.
    """
    for name in batches[0]:
        together, reverse, copies, *single = (parts[name] for parts in batches)
        for rows in single:
            if rows.shape[1:] != together.shape[1:]:
                raise dry.contract.wrong(
                    "embed",
                    f"returned {name!r} with rows of shape {tuple(together.shape[1:])} for "
                    f"{len(together)} samples, and {tuple(rows.shape[1:])} for one",
                    "let all rows have one shape",
                )
        alone = torch.cat(single[:-1])

        # The control: the first sample again, and in a batch of its copies.
        again = apart(alone[:1], single[-1])
        noise = max(again, apart(alone[:1].expand_as(copies), copies))
        limit = min(dry.rounding.tolerance, dry.rounding.limit(noise))
        if max(apart(together, alone), apart(reverse, alone.flip(0))) <= limit:
            continue

        # Find out why they differ.
        if again > limit:
            problem = "has other values for the same sample the next time"
            fix = "use torch's global generator"
        elif not together.stride(0):
            some = ", ".join(f"{float(value):.6g}" for value in alone[:3])
            problem = f"is 0-dim, but depends on the batch: {some}"
            fix = "give it one row per sample"
        else:
            problem = "depends on the other samples of the batch, or on the place in it"
            fix = (
                "another parallel layout would train a different model: compute each row from its "
                "sample only"
            )
        raise dry.contract.wrong("embed", f"returned {name!r}, which {problem}", fix)


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
        equal = {name: part[[0] * copies] if part.ndim else part for name, part in parts.items()}
        tiled = {}
        for name, column in columns.items():
            tiled[name] = column[[at % min(_COPIES, len(column)) for at in range(copies)]]
        return float(contract.batch_loss(equal, tiled))

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
