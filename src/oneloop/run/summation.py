"""How a run adds up what its ranks and micro-batches find: as it comes, or to the same bits for every split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.errors import BadInput
from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.tensors import optimizer_tensors
from oneloop.checkpoint.state import model_tensors
from oneloop.ema import EMA
from oneloop.machine.checks import Checks, search_unused
from oneloop.machine.randomness import has_batch_statistics
from oneloop.machine.reduction import Reduction, Tree
from oneloop.measure.fingerprint import fingerprint
from oneloop.measure.noise_scale import Sensor
from oneloop.run.job import Job
from oneloop.run.processes import Run
from oneloop.run.rehearsal import Rehearsal
from oneloop.run.start_lines import DEPENDS


class Summation(NamedTuple):
    """What the loop adds up by."""

    reduction: Reduction
    """of the gradients"""
    sensor: Sensor
    """sees them before"""
    total: Callable[[Tensor], Tensor]
    """of a step's loss over all ranks, 0-dim, on the device"""
    fingerprint: Callable[[], dict[str, str]]
    """hashes of what a checkpoint would hold, where the bits are promised; every rank must get here"""


def summation(
    job: Job, run: Run, model: nn.Module, optimizer: Optimizer, emas: Sequence[EMA], seen: Rehearsal
) -> Summation:
    """As the recipe asks for it (``batch.grain``)."""
    split, sensor = job.split, Sensor(run.accelerator, model, exact=job.exact, summed=True)
    checks = _checks(job, run, model, seen)
    if not job.exact:
        return Summation(Reduction(model, accumulate=split.accumulate, checks=checks), sensor, run.total, dict)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tree = Tree(model, parameters, ranks=run.ranks, accumulate=split.accumulate, checks=checks, see=sensor.see)
    mine = [split.leaf(run.rank, micro) for micro in range(split.accumulate)]
    places = torch.tensor(mine, device=run.device)

    def total(losses: Tensor) -> Tensor:
        """Of the leaves of this rank: each in its own place, where nothing is added to it; then in the tree."""
        everywhere = losses.new_zeros(split.ranks * split.accumulate)
        everywhere[places] = losses
        return tree_sum(run.total(everywhere))

    def bits() -> dict[str, str]:
        if not (run.main or run.sharded):
            return {}
        averages = {name: tensor for ema in emas for name, tensor in ema.tensors().items()}
        return fingerprint(model_tensors(model, frozen=False) | optimizer_tensors(model, optimizer) | averages)

    return Summation(tree, sensor, total, bits)


def _checks(job: Job, run: Run, model: nn.Module, seen: Rehearsal) -> Checks:
    """Of every step.

    Raises:
        BadInput: unused parameters must be searched for, and this torch cannot.
    """
    asked = job.recipe.machine.find_unused_parameters
    able = search_unused(model)
    if asked and not able:
        raise BadInput("machine.find_unused_parameters true requires torch 2.15 or newer under FSDP2")

    def report(name: str) -> None:
        run.display.say(f"a forward in training changes the {name}; {DEPENDS}")

    watched = not seen.moved and not has_batch_statistics(model)
    checks = Checks(
        model,
        parameters=run.ranks > 1 or job.exact,
        buffers=job.exact,
        report=report if watched else None,
        union=run.union if run.sharded and able and (asked or seen.unused) else None,
    )
    run.checks = checks if run.sharded else None
    return checks
