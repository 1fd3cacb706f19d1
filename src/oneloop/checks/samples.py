"""The first samples of a run: loaded twice, and collated, where the run reads its data."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.seeds import has_drawn, random_states, reseed
from oneloop.checks.contract import Contract
from oneloop.data.sample_checksums import checksum, fault
from oneloop.data.sample_reader import CannotSend, SampleReader
from oneloop.data.seeded_samples import Place, SeededSamples
from oneloop.frozen.outputs import placeholder_outputs
from oneloop.job.build import Job
from oneloop.machine.compile import CUDA_GRAPHS
from oneloop.task_protocol.user_code import theirs

TRAINED = "train_set()"  # the task's methods that return data sets

EVALUATED = "eval_sets()"  # followed by the set's name

SAMPLED = 4  # maximum number of samples; each is loaded twice

BY_COLLATE = "stores the samples that collate changes in place"


class TrialSamples:
    """Loads and collates the first samples, where the run reads its data.

    They are those of the run, and of each evaluation set.

    Args:
        job: what the recipe describes.
        device: the device that trains; None in a data worker, which has only the host.
    """

    def __init__(self, job: Job, device: torch.device | None) -> None:
        self._task = job.task
        self._collate = job.collate
        self._seed = job.recipe.seed
        self._device = device

        # Of each set (epoch, index) of some samples. Sums and rows are compared of at least two.
        number = min(SAMPLED, max(job.layout.each, 2), len(job.train_set))
        epochs, indices = job.order.at(np.arange(number))
        places = [*zip(epochs.tolist(), indices.tolist(), strict=True)]
        self._sets: dict[str, tuple[Any, list[Place]]] = {TRAINED: (job.train_set, places)}
        for name, dataset in job.eval_sets.items():
            number = min(SAMPLED, job.layout.each, len(dataset))
            places = [(0, index) for index in range(number)]
            self._sets[f"{EVALUATED}[{name!r}]"] = dataset, places

        self._contracts = {member: Contract(job.task) for member in self._sets}
        self._loads: dict[str, list[list[tuple[int, Any]]]] = {}  # copies of both loads
        self._wrong: dict[str, str] = {}
        self._stored: set[str] = set()  # both loads share memory
        self._changed = False  # whether collate changes samples in place

    @placeholder_outputs()
    def __call__(self, member: str, numbers: Sequence[int] = (), load: int = 0) -> Any:
        """Return a batch of samples, its weight, and whether collate drew random numbers.

        Without numbers, return how many samples there are, and what is wrong with the data set.

        Args:
            member: method of the task that returned the data set.
            numbers: positions among the first samples.
            load: 1 for the samples of the second load.
        """
        if member not in self._loads:
            self._load_twice(member)
        loaded = self._loads[member][load]
        if not numbers:
            return len(loaded), self._fault(member)
        samples = [loaded[number] for number in numbers]
        given = _copied([sample for _, sample in samples])

        # A data worker has its own generators. The pass seeds those of this process.
        device = self._device or torch.device("cpu")
        if self._device is None:
            reseed(device, self._seed, 0, others=True)
        contract = self._contracts[member]
        before = random_states(device)
        content = checksum(given)
        collated = contract.collated(given)
        draws = has_drawn(before, device)
        self._changed = self._changed or checksum(given) != content
        batch = self._collate.completed(collated, [index for index, _ in samples])
        weight = contract.weight(batch, samples=len(samples), trained=member == TRAINED)
        return batch, weight, draws

    def _load_twice(self, member: str) -> None:
        """Load the samples of a data set, keep copies, and compare both loads."""
        dataset, places = self._sets[member]
        keyed = SeededSamples(dataset, seed=self._seed)
        first = theirs(self._task, member, lambda: keyed.good(places))
        kept = _copied(first)
        content = checksum(first)
        again = theirs(self._task, member, lambda: keyed.good(places))
        self._loads[member] = [kept, _copied(again)]
        self._wrong[member] = fault(content, first, again)
        if _addresses(first) & _addresses(again):
            self._stored.add(member)

    def _fault(self, member: str) -> str:
        """Return what is wrong with a data set; empty: nothing."""
        wrong = self._wrong[member]
        if self._changed and member in self._stored:
            wrong = wrong or BY_COLLATE
        name = member.removeprefix(EVALUATED).strip("[']")
        of = "the training set" if member == TRAINED else f"the data set {name}"
        return f"{of} {wrong}" if wrong else ""


def _copied(value: Any) -> Any:
    """Return a sample with copies of its tensors, arrays and plain containers."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            return leaf.copy()
        return leaf.detach().clone() if _is_strided(leaf) else leaf

    return tree_map(copy, value)


def _addresses(value: Any) -> set[int]:
    """Return the addresses of tensors and arrays."""
    found = set()
    for leaf in tree_leaves(value):
        if isinstance(leaf, np.ndarray):
            found.add(leaf.ctypes.data)
        elif _is_strided(leaf):
            found.add(leaf.data_ptr())
    return found - {0}  # of tensors without elements


def _is_strided(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def check_sets(job: Job, read: SampleReader) -> list[str]:
    """Return remarks on evaluation sets whose samples change, and on lengths for CUDA graphs.

    Args:
        job: what the recipe describes.
        read: calls :class:`TrialSamples`.

    Raises:
        BadInput: the samples change, and the run has ``batch.grain``.
    """
    read(TRAINED)
    notes = []
    for name in job.eval_sets:
        _, wrong = read(f"{EVALUATED}[{name!r}]")
        if wrong:
            notes.append(f"{wrong}, so another evaluation has other results")
    if notes and job.exact:
        raise BadInput(
            f"batch.grain requires that a sample is the same each time, but {notes[0]}; return "
            "copies, and use torch's global generator"
        )

    # CUDA graphs are for one shape.
    machine = job.recipe.machine
    graphs = machine.compile != "none" and machine.compile_mode in CUDA_GRAPHS
    if graphs and _several_lengths(job, read):
        notes.append(
            f"machine.compile_mode {machine.compile_mode} records CUDA graphs again for each "
            "length of a batch, and samples have several; max-autotune-no-cudagraphs records none"
        )
    return notes


def _several_lengths(job: Job, read: SampleReader) -> bool:
    """Return whether samples have several lengths, as far as the order or the first ones show."""
    lengths = getattr(job.order, "lengths", None)
    if lengths is not None:
        return bool(lengths.min() < lengths.max())
    shapes = set()
    with suppress(CannotSend):  # the checks that follow report it
        for number in range(read(TRAINED)[0]):
            batch, *_ = read(TRAINED, [number])
            shapes.add(tuple(leaf.shape for leaf in tree_leaves(batch) if torch.is_tensor(leaf)))
    return len(shapes) > 1
