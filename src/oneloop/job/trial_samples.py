"""The first samples of a run: loaded and collated where the run reads its data, and compared."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.seeds import has_drawn, random_states, reseed
from oneloop.data.sample_contents import copied, fault, same
from oneloop.data.sample_reader import CannotSend, SampleReader
from oneloop.data.seeded_samples import Place, SeededSamples
from oneloop.data.step_batches import CollateWithWeight, transferred
from oneloop.frozen.outputs import placeholder_outputs
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.machine.compile import CUDA_GRAPHS
from oneloop.task_protocol.protocol import Task
from oneloop.task_protocol.protocol_checks import Contract, theirs

TRAINED = "train_set()"  # the task's methods that return data sets

EVALUATED = "eval_sets()"  # followed by the set's name

SAMPLED = 4  # maximum number of samples; each is loaded twice


class Sample(NamedTuple):
    """A sample of the check; the sample itself stays in the process that reads it."""

    reader: SampleReader  # calls :class:`TrialSamples`
    member: str  # method of the task that returned its data set
    load: int  # number of the load: a sample is loaded again for each number
    number: int  # position among the samples of the check


Samples = list[Sample]


class TrialSamples:
    """Loads and collates the samples of the check, where the run reads its data.

    Args:
        task: collates, and weighs the batch.
        collate: completes the batch.
        seed: of the recipe.
        sets: by the task's method that returns a data set: the set, and (epoch, index) of each
            sample.
        device: the device that trains; None in a data worker, which has only the host.
    """

    def __init__(
        self,
        task: Task,
        collate: CollateWithWeight,
        sets: Mapping[str, tuple[Any, list[Place]]],
        *,
        seed: int,
        device: torch.device | None,
    ) -> None:
        self._task = task
        self._collate = collate
        self._seed = seed
        self._sets = sets
        self._device = device
        self._contracts = {member: Contract(task) for member in sets}
        self._loaded: dict[tuple[str, int], list[tuple[int, Any]]] = {}
        self._first: dict[str, list[Any]] = {}  # as the data set returned them
        self._wrong: dict[str, str] = {}
        self._changed = False  # whether collate changes samples in place

    @classmethod
    def first(cls, job: Job, device: torch.device | None) -> "TrialSamples":
        """Return those of the first samples of the run, and of each evaluation set."""
        # Sums and rows are compared of at least two.
        number = min(SAMPLED, max(job.layout.each, 2), len(job.train_set))
        epochs, indices = job.order.at(np.arange(number))
        positions = [*zip(epochs.tolist(), indices.tolist(), strict=True)]
        sets: dict[str, Any] = {TRAINED: (job.train_set, positions)}
        for name, dataset in job.eval_sets.items():
            places = [(0, index) for index in range(min(SAMPLED, job.layout.each, len(dataset)))]
            sets[f"{EVALUATED}[{name!r}]"] = dataset, places
        return cls(job.task, job.collate, sets, seed=job.recipe.seed, device=device)

    @placeholder_outputs()
    def __call__(self, member: str, load: int, numbers: Sequence[int] = ()) -> Any:
        """Return a batch of samples, its weight, and whether collate drew random numbers.

        Without numbers, load the samples; return how many there are, and what is wrong with a
        repeated load.
        """
        dataset, places = self._sets[member]
        if (member, load) not in self._loaded:
            keyed = SeededSamples(dataset, seed=self._seed)
            loaded = theirs(self._task, member, lambda: keyed.good(places))
            self._loaded[member, load] = copied(loaded)
            self._first.setdefault(member, loaded)
            kept = self._loaded[member, 0]
            wrong = fault(kept, self._first[member], loaded, changed=self._changed)
            if load and wrong:
                name = member.removeprefix(EVALUATED).strip("[']")
                of = "the training set" if member == TRAINED else f"the data set {name}"
                self._wrong[member] = f"{of} {wrong}"
        if not numbers:
            return len(self._loaded[member, load]), self._wrong.get(member, "")
        samples = [self._loaded[member, load][number] for number in numbers]
        given = copied([sample for _, sample in samples])

        # A data worker has its own generators. The pass seeds those of this process.
        device = self._device or torch.device("cpu")
        if self._device is None:
            reseed(device, self._seed, 0, others=True)
        contract = self._contracts[member]
        before = random_states(device)
        collated = contract.collated(given)
        draws = has_drawn(before, device)
        self._changed = self._changed or not same([sample for _, sample in samples], given)
        batch = self._collate.completed(collated, [index for index, _ in samples])
        weight = contract.weight(batch, samples=len(samples), trained=member == TRAINED)
        return batch, weight, draws


def load_samples(reader: SampleReader, member: str, load: int) -> tuple[Samples, str]:
    """Load the samples of a data set; an error names the task's method that returned the set.

    Also return what is wrong with the data set, if this is not the first load.
    """
    number, wrong = reader(member, load)
    return [Sample(reader, member, load, at) for at in range(number)], wrong


def check_sets(job: Job, reader: SampleReader) -> list[str]:
    """Return remarks on evaluation sets whose samples change, and on lengths for CUDA graphs.

    Args:
        job: what the recipe describes.
        reader: calls :class:`TrialSamples`.

    Raises:
        BadInput: the samples change, and the run has ``batch.grain``.
    """
    notes = []
    for name in job.eval_sets:
        member = f"{EVALUATED}[{name!r}]"
        load_samples(reader, member, 0)
        _, wrong = load_samples(reader, member, 1)
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
    if graphs and _several_lengths(job, reader):
        notes.append(
            f"machine.compile_mode {machine.compile_mode} records CUDA graphs again for each "
            "length of a batch, and samples have several; max-autotune-no-cudagraphs records none"
        )
    return notes


def _several_lengths(job: Job, reader: SampleReader) -> bool:
    """Return whether samples have several lengths, as far as the order or the first ones show."""
    lengths = getattr(job.order, "lengths", None)
    if lengths is not None:
        return bool(lengths.min() < lengths.max())
    shapes = set()
    with suppress(CannotSend):  # the checks that follow report it
        for number in range(reader(TRAINED, 0)[0]):
            batch, *_ = reader(TRAINED, 0, [number])
            found = tree_leaves(batch)
            shapes.add(tuple(leaf.shape for leaf in found if torch.is_tensor(leaf)))
    return len(shapes) > 1


def make_batch(contract: Contract, run: Run, samples: Samples) -> tuple[Any, float]:
    """Collate samples; return the batch on the device and its weight.

    Args:
        contract: records whether collate draws random numbers.
        run: this process.
        samples: of one load.
    """
    reader, member, load, _ = samples[0]
    try:
        batch, weight, draws = reader(member, load, [sample.number for sample in samples])
    except CannotSend as error:
        raise contract.wrong(
            "collate",
            f"returned a batch that a data worker cannot send ({error})",
            "return tensors, or load the data without workers (--machine.workers 0)",
        ) from error
    contract.draws = contract.draws or draws
    contract.collate_draws = contract.collate_draws or draws
    return next(transferred(iter([batch]), run.device)), weight
