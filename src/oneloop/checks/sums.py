"""Check before a run that loss and gradient of a batch are the sums of those of its samples.

A model that draws random numbers, or has BatchNorm, is in eval mode for it.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensors import restored_buffers
from oneloop.checks.dry_run import DryRun
from oneloop.checks.modes import without_draws
from oneloop.checks.passes import Measure, Pass

_NONE = Measure(0.0, 0.0, 0.0)


class Distance(NamedTuple):
    """Relative distances of a batch from the sum of its parts."""

    loss: float
    gradient: float  # the largest one of all parameters
    name: str  # of this parameter

    def exceeds(self, limit: float) -> bool:
        return max(self.loss, self.gradient) > limit


def distance(whole: Pass, parts: Sequence[Pass], floor: float) -> Distance:
    """Return how far loss and gradients of a batch are from the sums of its parts."""
    losses = [part.loss for part in parts]
    loss = _relative(whole.loss, losses, math.fsum(map(abs, losses)))

    # A gradient that is 0 but for rounding (biases of keys) is compared with all the others.
    noise = floor * math.fsum(gradient.norm for gradient in whole.gradients.values())
    gradients = [(0.0, "")]
    for name, gradient in whole.gradients.items():
        found = [part.gradients.get(name, _NONE) for part in parts]
        size = max(gradient.norm, math.fsum(one.norm for one in found)) + noise
        summed = [one.product for one in found]
        gradients.append((_relative(gradient.product, summed, size), name))
    return Distance(loss, *max(gradients))


def _relative(whole: float, parts: Sequence[float], size: float) -> float:
    """Return the distance from the sum of the parts, relative to ``size``.

    It is 0 if a value is not finite.
    """
    if not all(map(math.isfinite, (whole, *parts))):
        return 0.0
    apart = abs(whole - math.fsum(parts))
    return apart / size if 0.0 < size < math.inf else apart


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
    found = distance(whole, sums, rounding.floor)
    if not dry.any(found.exceeds(rounding.least)):
        return ""

    # The control: the same samples again, and in reverse order.
    again = _train(dry, everything)
    repeated = distance(whole, [again], rounding.floor)
    controls = [repeated]
    for part, one in zip([everything, *parts], [again, *sums], strict=True):
        reverse = _train(dry, part[::-1])
        controls.append(distance(one, [reverse], rounding.floor))
    loss = rounding.limit(max(control.loss for control in controls))
    gradient = rounding.limit(max(control.gradient for control in controls))

    # A model that keeps state has no such sums; other checks report it.
    if dry.any(repeated.exceeds(rounding.most)):
        return ""
    if found.loss > loss:
        # Print enough digits to show the difference.
        digits = max(6, 2 - math.floor(math.log10(found.loss)))
        losses = " + ".join(f"{one.loss:.{digits}g}" for one in sums)
        raise dry.contract.wrong(
            "loss",
            f"returned {whole.loss:.{digits}g} {mode} for samples whose losses are {losses}",
            "another parallel layout would train a different model: let each sample's loss "
            "depend only on that sample."
            " If that is impossible (auxiliary losses, batch statistics, mixup), set additive "
            "= False in the class",
        )
    return found.name if found.gradient > gradient else ""


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
