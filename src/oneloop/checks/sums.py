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
from oneloop.checks.dry_run import DryRun, TrialPass
from oneloop.checks.modes import without_draws
from oneloop.checks.passes import Measure
from oneloop.checks.tolerance import limits_of
from oneloop.data.step_batches import Batch

_NONE = Measure(0.0, 0.0, 0.0)


class Distance(NamedTuple):
    """Relative distances of a batch from the sum of its parts."""

    loss: float
    gradient: float  # the largest one of all parameters
    name: str  # of this parameter

    def exceeds(self, limit: float) -> bool:
        return max(self.loss, self.gradient) > limit


def distance(whole: TrialPass, parts: Sequence[TrialPass]) -> Distance:
    """Return how far loss and gradients of a batch are from the sums of its parts."""
    losses = [part.loss for part in parts]
    loss = _relative(whole.loss, losses, math.fsum(map(abs, losses)))

    # A gradient that is 0 but for rounding (biases of keys) is compared with all the others.
    noise = 1e-2 * math.fsum(gradient.norm for gradient in whole.gradients.values())
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


def check_sums(dry: DryRun, first: TrialPass) -> str:
    """Return the name of a parameter whose gradient is not the sum of those of the samples.

    Return an empty text if there is none. Collective under FSDP2: call on every rank.

    Args:
        dry: the dry run, with at least two samples.
        first: result of the first micro-batch in training mode.

    Raises:
        BadInput: the loss of the batch is not the sum of the losses of its samples.
    """
    if not dry.contract.additive or dry.number < 2:
        return ""
    sums = _Sums(dry)
    known = first if len(dry.micro_batch) == dry.number else None
    compute = partial(sums.of, range(dry.number))
    try:
        with without_draws(dry.model, dry.root, compute, known) as (whole, mode):
            # If random numbers are always drawn, a sample alone would get others.
            return "" if whole is None else sums.compare(whole, mode)
    except torch.OutOfMemoryError:  # they may be more than a micro-batch has
        return ""


class _Sums:
    """Losses and gradients of some of the first samples."""

    def __init__(self, dry: DryRun) -> None:
        self._dry = dry
        self._comparable = True  # whether the batch can be divided

    def compare(self, whole: TrialPass, mode: str) -> str:
        """Return a parameter whose gradients do not add up. Raise BadInput if the losses do not."""
        dry = self._dry
        limits = limits_of(dry.job, dry.run, dry.model)
        parts, sums = self._divided()
        found = distance(whole, sums)
        if not self._comparable or not dry.any(found.exceeds(limits.least)):
            return ""

        # The control: the same samples again, and in reverse order.
        everything = range(dry.number)
        again = self.of(everything)
        repeated = distance(whole, [again])
        controls = [repeated, distance(again, [self.of(everything[::-1])])]
        for part, one in zip(parts, sums, strict=True):
            controls.append(distance(one, [self.of(part[::-1])]))
        loss = limits.allow(max(control.loss for control in controls))
        gradient = limits.allow(max(control.gradient for control in controls))

        # A model that keeps state has no such sums; other checks report it.
        if dry.any(repeated.exceeds(limits.most)):
            return ""
        if found.loss > loss:
            raise dry.contract.wrong_sum(whole.loss, [one.loss for one in sums], mode)
        return found.name if found.gradient > gradient else ""

    def _divided(self) -> tuple[list[range], list[TrialPass]]:
        """Return the parts of the batch, and their results: each sample, or else the halves."""
        number = self._dry.number
        single = [range(at, at + 1) for at in range(number)]
        try:
            return single, [*map(self.of, single)]
        except BadInput:  # the loss needs several samples
            halves = [range(number // 2), range(number // 2, number)]
            return halves, [*map(self.of, halves)]

    def of(self, places: range) -> TrialPass:
        """Run forward and backward over these samples, with the same seeds each time."""
        return self._dry.train(self._batch(places))

    def _batch(self, places: range) -> Batch:
        """Return the batch of these samples."""
        batch, _ = self._dry.batch(places)

        # If collate draws, take the rows of the whole batch, which has other random numbers.
        if self._dry.contract.draws:
            whole, _ = self._dry.batch(range(self._dry.number))
            for name, value in batch.items():
                batch[name] = self._rows(whole[name], value, places)
        return batch

    def _rows(self, whole: Any, part: Any, places: range) -> Any:
        """Return what belongs to these samples, of a value of the whole batch."""
        is_tensor = isinstance(part, Tensor)
        if isinstance(part, list | tuple) or (is_tensor and part.ndim):
            if (len(whole), len(part)) == (self._dry.number, len(places)):
                return whole[[*places]] if is_tensor else [whole[at] for at in places]
            self._comparable = self._comparable and is_tensor and whole.shape == part.shape
        return whole
