"""Check before a run that loss and gradient of a batch are the sums of those of its samples.

A model that draws random numbers, or has BatchNorm, is in eval mode for it.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensors import restored_buffers
from oneloop.checks.dry_run import DryRun
from oneloop.checks.modes import without_draws
from oneloop.checks.passes import LOSS, Measure, Pass

_NONE = Measure(0.0, 0.0, 0.0)


def distances(whole: Pass, parts: Sequence[Pass], floor: float) -> dict[str, float]:
    """Return how far loss and gradients of a batch are from the sums of its parts, by name.

    Distances are relative; that of values that are not finite is 0.

    Args:
        whole: result of the batch.
        parts: results of its parts.
        floor: share of all gradients. A gradient that is 0 but for rounding (biases of keys) is
            compared with it.
    """
    gradients = [measure.norm for name, measure in whole.items() if name != LOSS]
    noise = floor * sum(gradients)
    found = {}
    for name, measure in whole.items():
        summands = [part.get(name, _NONE) for part in parts]
        gap = abs(measure.product - sum(summand.product for summand in summands))
        size = max(measure.norm, sum(summand.norm for summand in summands))
        if name != LOSS:
            size += noise
        found[name] = gap / size if size and math.isfinite(gap) else 0.0
    return found


def check_sums(dry: DryRun, first: Pass) -> str:
    """Return the name of a parameter whose gradient is not the sum of those of the samples.

    Return an empty text if there is none. Collective under FSDP2: call on every rank.

    Args:
        dry: the dry run, with at least two samples.
        first: result of the first micro-batch in training mode.

    Raises:
        BadInput: the loss of the batch is not the sum of the losses of its samples.
    """
    if not dry.contract.additive or len(dry.samples) < 2:
        return ""
    # A model that changes its weights has no such sums, which is reported already.
    if any(name.startswith("parameter") for name in dry.found.moved):
        return ""
    known = dry.micro_batch == dry.samples
    compute = partial(_train, dry, dry.samples)
    try:
        with without_draws(dry, compute, first if known else None) as (whole, mode):
            # If random numbers are always drawn, a sample alone would get others.
            return "" if whole is None else _compare(dry, whole, mode)
    except _NoRows:
        return ""
    except torch.OutOfMemoryError:
        if known:
            raise
        return ""  # more samples than a micro-batch has


class _NoRows(Exception):
    """A batch of which collate draws, and which has values that cannot be divided."""


def _compare(dry: DryRun, whole: Pass, mode: str) -> str:
    """Return a parameter whose gradients do not add up. Raise BadInput if the losses do not."""
    rounding = dry.rounding
    everything = dry.samples
    parts = [everything[at : at + 1] for at in everything]
    try:
        sums = [_train(dry, part) for part in parts]
    except BadInput:  # the loss needs several samples: compare the halves
        half = len(everything) // 2
        parts = [everything[:half], everything[half:]]
        sums = [_train(dry, part) for part in parts]
    found = distances(whole, sums, rounding.floor)
    if not dry.any(max(found.values()) > rounding.least):
        return ""

    # The control: the same samples again, and in reverse order.
    again = _train(dry, everything)
    repeated = distances(whole, [again], rounding.floor)
    controls = [repeated]
    for part, one in zip([everything, *parts], [again, *sums], strict=True):
        reverse = _train(dry, part[::-1])
        controls.append(distances(one, [reverse], rounding.floor))

    # A model that keeps state has no such sums; other checks report it.
    if dry.any(max(repeated.values()) > rounding.most):
        return ""
    loss = found.pop(LOSS)
    if loss > rounding.limit(max(control.pop(LOSS) for control in controls)):
        # Print enough digits to show the difference.
        digits = max(6, 2 - math.floor(math.log10(loss)))
        losses = " + ".join(f"{one[LOSS].product:.{digits}g}" for one in sums)
        raise dry.contract.wrong(
            "loss",
            f"returned {whole[LOSS].product:.{digits}g} {mode} for samples whose losses are "
            f"{losses}",
            "another parallel layout would train a different model: let each sample's loss "
            "depend only on that sample."
            " If that is impossible (auxiliary losses, batch statistics, mixup), set additive "
            "= False in the class",
        )

    # The gradients: their noise is that of the parameter with the largest one.
    noise = max(max(control.values(), default=0.0) for control in controls)
    name = max(found, key=found.__getitem__, default="")
    return name if found.get(name, 0.0) > rounding.limit(noise) else ""


def _train(dry: DryRun, places: range) -> Pass:
    """Return the result of a pass over these samples, with the same seeds each time."""
    batch = dry.batch(places)

    # If collate draws, take the rows of the whole batch, which has other random numbers.
    if dry.found.collate_draws:
        whole = dry.batch(dry.samples)
        for name, value in batch.items():
            batch[name] = _rows(whole[name], value, places, len(dry.samples))
    with restored_buffers(dry.model):
        return dry.train(batch)


def _rows(whole: Any, part: Any, places: range, number: int) -> Any:
    """Return what belongs to these samples, of a value of the whole batch."""
    is_tensor = isinstance(part, Tensor)
    if isinstance(part, list | tuple) or (is_tensor and part.ndim):
        if (len(whole), len(part)) == (number, len(places)):
            return whole[[*places]] if is_tensor else [whole[at] for at in places]
        if not is_tensor or whole.shape != part.shape:
            raise _NoRows
    return whole
