"""The first samples of a run: loaded twice, and collated, where the run reads its data."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from oneloop.basics.content_hash import content_hash
from oneloop.basics.seeds import random_states, reseed
from oneloop.data.fingerprint import fault
from oneloop.data.seeded_samples import SeededSamples
from oneloop.job.build import Job
from oneloop.task_protocol.contract import Contract
from oneloop.task_protocol.user_code import theirs

TRAINED = "train"  # name of the training set among the sets of a job

SAMPLED = 4  # maximum number of samples; each is loaded twice

BY_COLLATE = "stores the samples that collate changes in place"


class TrialSamples:
    """Loads and collates the first samples of a data set of the run.

    Args:
        job: what the recipe describes.
        name: of the data set.
        device: the device of random numbers; in a data worker the host.
    """

    def __init__(self, job: Job, name: str, device: torch.device) -> None:
        # A data worker may be unable to receive the job.
        self._collate = job.collate
        self._seed = job.recipe.seed
        self._device = device
        self._contract = Contract(job.task)  # of this set: others may have other keys of batches
        self._samples = SeededSamples(job.sets[name], seed=job.recipe.seed)
        self._loads: list[list[tuple[int, Any]]] = []  # copies of both loads
        self._stored = False  # whether both loads share memory
        self._wrong = ""

        # Sums and rows are compared of at least two training samples.
        each = job.layout.each
        length = len(job.sets[name])
        self._trained = name == TRAINED
        if self._trained:
            self._set, self._member = "the training set", "train_set()"
            epochs, indices = job.order.at(np.arange(min(SAMPLED, max(each, 2), length)))
            self._places = [*zip(epochs.tolist(), indices.tolist(), strict=True)]
        else:
            self._set, self._member = f"the data set {name}", f"eval_sets()[{name!r}]"
            self._places = [(0, index) for index in range(min(SAMPLED, each, length))]

    def __call__(self, numbers: Sequence[int] = (), load: int = 0, seed: int = 0) -> Any:
        """Return a batch of samples, its weight, and whether collate drew random numbers.

        Without numbers, return how many samples there are, and what is wrong with the data set.

        Args:
            numbers: positions among the first samples.
            load: 1 for the samples of the second load.
            seed: a different seed gives different random numbers.
        """
        contract = self._contract
        if not self._loads:
            self._load_twice()
        if not numbers:
            return len(self._loads[0]), f"{self._set} {self._wrong}" if self._wrong else ""
        samples = [self._loads[load][number] for number in numbers]
        given = copied([sample for _, sample in samples])
        content = content_hash(given)

        # Collate with generators that are seeded.
        reseed(self._device, self._seed, seed, others=True)
        before = random_states(self._device)
        collated = contract.collated(given)
        draws = before != random_states(self._device)
        if self._stored and content_hash(given) != content:
            self._wrong = self._wrong or BY_COLLATE
        batch = self._collate.completed(collated, [index for index, _ in samples])
        weight = contract.weight(batch, samples=len(samples), trained=self._trained)
        return batch, weight, draws

    def _load_twice(self) -> None:
        """Load the samples, keep copies, and compare both loads."""
        task = self._contract.task
        load = partial(theirs, task, self._member, partial(self._samples.good, self._places))
        first = load()
        kept = copied(first)
        content = content_hash(first)
        again = load()
        self._loads = [kept, copied(again)]
        self._wrong = fault(content, first, again)
        self._stored = not _addresses(first).isdisjoint(_addresses(again))


def read_samples(sets: Mapping[str, TrialSamples], name: str, *given: Any) -> Any:
    """Return what :class:`TrialSamples` of the data set of this name return."""
    return sets[name](*given)


def copied(value: Any) -> Any:
    """Return a sample with copies of its tensors, arrays and plain containers."""
    arrays = tree_map_only(np.ndarray, lambda array: array.copy(), value)
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), arrays)


def _addresses(value: Any) -> set[int]:
    """Return the addresses of tensors and arrays that have elements."""
    found = set()
    for leaf in tree_leaves(value):
        if isinstance(leaf, np.ndarray) and leaf.size:
            found.add(leaf.ctypes.data)
        elif isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.numel():
            found.add(leaf.data_ptr())
    return found
