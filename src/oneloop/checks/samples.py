"""The first samples of a run: loaded twice, and collated, where the run reads its data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from oneloop.basics.content_hash import content_hash
from oneloop.basics.seeds import random_states, reseed
from oneloop.data.fingerprint import fault
from oneloop.data.seeded_samples import Place, SeededSamples
from oneloop.job.build import Job
from oneloop.task_protocol.contract import Contract
from oneloop.task_protocol.user_code import theirs

TRAINED = "train"  # name of the training set among the sets of a job

SAMPLED = 4  # maximum number of samples; each is loaded twice

BY_COLLATE = "stores the samples that collate changes in place"


@dataclass
class _FirstOfSet:
    """A data set, and what is known of its first samples."""

    dataset: Any
    places: list[Place]
    contract: Contract  # evaluation batches may have other keys than those of training
    loads: list[list[tuple[int, Any]]] = field(default_factory=list)  # copies of both loads
    stored: bool = False  # whether both loads share memory
    wrong: str = ""


class TrialSamples:
    """Loads and collates the first samples of the run, and of each evaluation set.

    Args:
        job: what the recipe describes.
        device: the device of random numbers; in a data worker the host.
    """

    def __init__(self, job: Job, device: torch.device) -> None:
        # A data worker may be unable to receive the job.
        self._task = job.task
        self._collate = job.collate
        self._seed = job.recipe.seed
        self._device = device

        # Sums and rows are compared of at least two training samples.
        each = job.layout.each
        number = min(SAMPLED, max(each, 2), len(job.train_set))
        epochs, indices = job.order.at(np.arange(number))
        self._sets: dict[str, _FirstOfSet] = {}
        for name, dataset in job.sets.items():
            places = [(0, index) for index in range(min(SAMPLED, each, len(dataset)))]
            if name == TRAINED:
                places = [*zip(epochs.tolist(), indices.tolist(), strict=True)]
            self._sets[name] = _FirstOfSet(dataset, places, Contract(job.task))

    def __call__(
        self,
        name: str,
        numbers: Sequence[int] = (),
        load: int = 0,
        seed: int = 0,
    ) -> Any:
        """Return a batch of samples, its weight, and whether collate drew random numbers.

        Without numbers, return how many samples there are, and what is wrong with the data set.

        Args:
            name: of the data set.
            numbers: positions among the first samples.
            load: 1 for the samples of the second load.
            seed: a different seed gives different random numbers.
        """
        first = self._sets[name]
        if not first.loads:
            self._load_twice(name, first)
        if not numbers:
            of = "the training set" if name == TRAINED else f"the data set {name}"
            return len(first.loads[0]), f"{of} {first.wrong}" if first.wrong else ""
        samples = [first.loads[load][number] for number in numbers]
        given = copied([sample for _, sample in samples])
        content = content_hash(given)

        # Collate with generators that are seeded.
        reseed(self._device, self._seed, seed, others=True)
        before = random_states(self._device)
        collated = first.contract.collated(given)
        draws = before != random_states(self._device)
        if first.stored and content_hash(given) != content:
            first.wrong = first.wrong or BY_COLLATE
        batch = self._collate.completed(collated, [index for index, _ in samples])
        weight = first.contract.weight(batch, samples=len(samples), trained=name == TRAINED)
        return batch, weight, draws

    def _load_twice(self, name: str, into: _FirstOfSet) -> None:
        """Load the samples of a data set, keep copies, and compare both loads."""
        member = "train_set()" if name == TRAINED else f"eval_sets()[{name!r}]"
        keyed = SeededSamples(into.dataset, seed=self._seed)
        first = theirs(self._task, member, lambda: keyed.good(into.places))
        kept = copied(first)
        content = content_hash(first)
        again = theirs(self._task, member, lambda: keyed.good(into.places))
        into.loads = [kept, copied(again)]
        into.wrong = fault(content, first, again)
        into.stored = not _addresses(first).isdisjoint(_addresses(again))


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
