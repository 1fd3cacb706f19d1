"""The inputs of a planned step: the largest samples of a data set, in few micro-batches."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.seeded_samples import Batches, SeededSamples
from oneloop.data.step_batches import Batch
from oneloop.job.build import Job
from oneloop.job.trial_steps import by_size, loaded_sizes
from oneloop.launch.processes import Run
from oneloop.task_protocol.whole_batch import is_whole_batch

SAMPLED = 256  # samples of unknown size that are loaded to find the largest


def shortened(job: Job, run: Run) -> tuple[Job, int]:
    """Return the job with at most two micro-batches per step, and for how many the first counts.

    All of them are needed with ``batch.grain``, and for a loss over the whole batch.
    """
    layout = job.layout
    if layout.accumulate <= 2 or job.exact or is_whole_batch(job.task):
        return job, 1
    size = 2 * run.ranks * layout.each
    shorter = BatchLayout(size, run.ranks, layout.each)
    return replace(job, layout=shorter), layout.accumulate - 1


def largest_samples(job: Job, number: int) -> list[int]:
    """Return the indices of the largest training samples; repeat them if ``number`` is larger."""
    largest = by_size(job, SAMPLED)
    indices = []
    for position in range(number):
        indices.append(largest[position % len(largest)])
    return indices


def may_be_larger(job: Job) -> bool:
    """Return whether samples may be larger than all that were loaded to find the largest.

    Without lengths, only the first ones are loaded. If these are equal, so are the others.
    """
    has_lengths = hasattr(job.train_set, "lengths")
    if has_lengths or job.collate.sample_weight is not None:
        return False
    if len(job.train_set) <= SAMPLED:
        return False
    return len(set(loaded_sizes(job, SAMPLED))) > 1


def largest_batches(job: Job) -> list[tuple[Batch, float]]:
    """Return the micro-batches of a step, of the largest samples, with their weights."""
    samples = SeededSamples(job.train_set, seed=job.recipe.seed)
    load = Batches(samples, job.collate)
    micro = job.layout.each
    indices = largest_samples(job, micro * job.layout.accumulate)
    batches = []
    for start in range(0, len(indices), micro):
        places = [(0, index) for index in indices[start : start + micro]]
        batches.append(load[places])
    return batches


def loaded_by(call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return a context in which ``call(load, …)`` loads each batch of an evaluation."""
    load = Batches.__getitem__

    def outside(*given: Any) -> Any:
        return call(load, *given)

    return patch.object(Batches, "__getitem__", outside)
