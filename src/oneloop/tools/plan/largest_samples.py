"""The largest samples of a data set, and the micro-batches of a step with them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from oneloop.data.seeded_samples import SKIPPED, Batches, SeededSamples
from oneloop.data.step_batches import Batch
from oneloop.job.build import Job

SAMPLED = 256  # samples of unknown size that a plan loads to find the largest
_EQUAL = 4096  # samples of one size that are compared


def sizes_of(job: Job, most: int | None = None) -> Any:
    """Return the sizes of training samples: of the first ones, if the others cannot be larger.

    Args:
        job: its training set.
        most: largest number of samples that are loaded to know their sizes (None: all).
    """
    number = len(job.train_set)
    if job.collate.sample_weight is not None:
        return np.ones(min(number, _EQUAL))

    # Texts know their lengths.
    lengths = getattr(job.train_set, "lengths", None)
    if lengths is not None:
        return lengths

    # Count the elements of the others.
    samples = SeededSamples(job.train_set, seed=job.recipe.seed)
    sizes = []
    for index in range(min(number, most or number)):
        batch, _ = job.collate([samples[0, index]])
        elements = 0
        for value in batch.values():
            if torch.is_tensor(value):
                elements += value.numel()
        sizes.append(elements)
    return np.array(sizes)


def by_size(job: Job, most: int | None = None) -> list[int]:
    """Return indices of the samples that :func:`sizes_of` measures, largest first."""
    largest: list[int] = np.argsort(-sizes_of(job, most), kind="stable").tolist()
    return largest


def may_be_larger(job: Job) -> bool:
    """Return whether samples after the first ones may be larger than these.

    If the first ones are equal, so are the others.
    """
    sizes = sizes_of(job, SAMPLED)
    return len(sizes) < len(job.train_set) and len(np.unique(sizes)) > 1


def batches_of(job: Job, indices: Sequence[int]) -> list[tuple[Batch, float]]:
    """Return the micro-batches of a step, with their weights.

    Args:
        job: its training set and its layout.
        indices: indices of the samples, which are repeated if the step has more.
    """
    load = Batches(SeededSamples(job.train_set, seed=job.recipe.seed), job.collate)
    layout = job.layout
    batches = []
    for row in np.resize(indices, (layout.accumulate, layout.each)).tolist():
        batch, weight = load[[(0, index) for index in row]]
        batch.pop(SKIPPED, None)  # it is for the run's list of left out samples
        batches.append((batch, weight))
    return batches
