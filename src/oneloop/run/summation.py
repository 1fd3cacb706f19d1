"""How a run adds up what its ranks and micro-batches find: as it comes, or to the same bits for every split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oneloop.basics.exact_sums import tree_sum
from oneloop.basics.tensors import optimizer_tensors
from oneloop.checkpoint.state import model_tensors
from oneloop.ema import EMA
from oneloop.machine.reduction import Reduction, Tree
from oneloop.measure.fingerprint import fingerprint
from oneloop.measure.noise_scale import Sensor
from oneloop.run.job import Job
from oneloop.run.processes import Run


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


def summation(job: Job, run: Run, model: nn.Module, optimizer: Optimizer, emas: Sequence[EMA]) -> Summation:
    """As the recipe asks for it (``batch.grain``)."""
    split, sensor = job.split, Sensor(run.accelerator, model, exact=job.exact)
    if not job.exact:
        return Summation(Reduction(run.ranks, split.accumulate), sensor, run.total, dict)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tree = Tree(model, parameters, ranks=run.ranks, accumulate=split.accumulate, see=sensor.see)
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
