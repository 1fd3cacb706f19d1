"""What the ranks have found out in a repeat of a micro-batch, and how their reports differ."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from oneloop.basics.differences import differences
from oneloop.checks.passes import LOSS, Pass

_NOISE = 10.0  # where reruns differ: allowed multiple of the difference of two reruns


class Report(NamedTuple):
    """What one rank has found out."""

    samples: dict[str, str]  # checksum of each entry of the micro-batch, as loaded again
    trained: dict[str, str]  # the same of the micro-batch of this number that it trains
    # names of tensors that have changed, but not by updates, and when: "in a forward"
    changes: dict[str, str]
    attributes: list[str]  # that the first pass has changed
    shared: dict[str, int]  # hash of each parameter that all ranks have, before the passes
    passes: tuple[Pass, Pass]


def describe_difference(
    reports: Sequence[Report], chosen: int, *, least: float | None, across: bool
) -> str:
    """Return how samples, losses and gradients of reports differ; an empty text if they do not.

    Args:
        reports: of all ranks.
        chosen: the rank that trains the micro-batch.
        least: smallest relative difference that counts; more counts only if it is more than ten
            times the difference of two reruns. None: reruns are bit-identical.
        across: whether to compare results of the ranks, too.
    """
    for rank, report in enumerate(reports):
        for name in differences(reports[chosen].trained, report.samples):
            return (
                f"rank {rank} has loaded other values of {name!r} for the samples of a micro-batch "
                f"than rank {chosen} trains on: the data set or collate depends on more than the "
                "index, the epoch and the seed (a counter, a private generator, a changed sample, "
                "a data worker's number)"
            )
    noise = {} if least is None else _noise(reports, least)
    for rank, report in enumerate(reports):
        found = difference(*report.passes, noise)
        if found:
            names = [*dict.fromkeys(report.attributes)]
            changed = ", ".join(names[:3]) or "nothing that can be compared"
            return (
                f"rank {rank} got {found} for the same micro-batch, seeds and weights the second "
                f"time; what changed in between: {changed}"
            )
    for rank, report in enumerate(reports):
        found = difference(reports[chosen].passes[0], report.passes[0], noise)
        if found and across:
            return (
                f"ranks {chosen} and {rank} got {found} for the same micro-batch, seeds and weights"
            )
    return ""


def _noise(reports: Sequence[Report], least: float) -> dict[str, float]:
    """Return by how much reruns may differ, for the loss and each gradient."""
    noise: dict[str, float] = {}
    for report in reports:
        one, other = report.passes
        for name, value in one.items():
            apart = abs(value.product - other.get(name, value).product)
            noise[name] = max(noise.get(name, 0.0), least * value.norm, _NOISE * apart)
    return noise


def difference(one: Pass, other: Pass, noise: Mapping[str, float]) -> str:
    """Return how two passes differ; an empty text if they do not, or are not finite.

    Args:
        one: a pass.
        other: the pass that it is compared with.
        noise: allowed difference of the loss, and of each gradient; 0 or none: no bit.
    """
    losses = one[LOSS].product, other[LOSS].product
    if not all(map(math.isfinite, losses)):
        return ""
    for name in {**one, **other}:
        mine = one.get(name)
        theirs = other.get(name)
        if mine is None or theirs is None:
            return f"a gradient of {name} only once"
        finite = math.isfinite(mine.product) or math.isfinite(theirs.product)
        if mine.hash == theirs.hash or not finite:
            continue
        if abs(mine.product - theirs.product) <= noise.get(name, -1.0):
            continue
        if name == LOSS:
            return f"the losses {losses[0]:.9g} and {losses[1]:.9g}"
        return f"other gradients of {name} (norms {mine.norm:.9g} and {theirs.norm:.9g})"
    return ""
