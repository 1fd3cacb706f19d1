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
    return replace(job, layout=BatchLayout(size, run.ranks, layout.each)), layout.accumulate - 1


def largest_samples(job: Job, number: int) -> list[int]:
    """Return the indices of the largest training samples; repeat them if ``number`` is larger."""
    largest = by_size(job, SAMPLED)
    return [largest[position % len(largest)] for position in range(number)]


def may_be_larger(job: Job) -> bool:
    """Return whether samples may be larger than all that were loaded to find the largest.

    Without lengths, only the first ones are loaded. If these are equal, so are the others.
    """
    has_lengths = job.collate.sample_weight is not None or hasattr(job.train_set, "lengths")
    unknown = not has_lengths and len(job.train_set) > SAMPLED
    return unknown and len(set(loaded_sizes(job, SAMPLED))) > 1


def largest_batches(job: Job) -> list[tuple[Batch, float]]:
    """Return the micro-batches of a step, of the largest samples, with their weights."""
    micro = job.layout.each
    places = [(0, index) for index in largest_samples(job, micro * job.layout.accumulate)]
    load = Batches(SeededSamples(job.train_set, seed=job.recipe.seed), job.collate)
    return [load[places[start : start + micro]] for start in range(0, len(places), micro)]


def loaded_by(call: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Return a context in which ``call(load, …)`` loads each batch of an evaluation."""
    load = Batches.__getitem__
    return patch.object(Batches, "__getitem__", lambda *given: call(load, *given))
