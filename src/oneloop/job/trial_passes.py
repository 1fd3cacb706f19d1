"""One forward and backward over a few samples before a run.

Gradients, buffers and random states are restored.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import other_states, reseed
from oneloop.basics.tensors import as_real, local
from oneloop.basics.wide_sums import wide_dtype
from oneloop.data.sample_reader import CannotSend, SampleReader
from oneloop.data.seeded_samples import Place, SeededSamples
from oneloop.data.step_batches import CollateWithWeight, transferred
from oneloop.job.build import Job
from oneloop.job.restore import has_drawn, random_states, restored
from oneloop.job.sample_contents import copied, fault, same
from oneloop.launch.processes import Run
from oneloop.machine.compile import CUDA_GRAPHS
from oneloop.machine.layout_checks import Checks
from oneloop.measure.flops import Operations
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

    def __call__(self, member: str, load: int, numbers: Sequence[int] = ()) -> Any:
        """Return a batch of samples, its weight, and whether collate drew random numbers.

        Without numbers, load the samples; return how many there are, and what is wrong with a
        repeated load.
        """
        dataset, places = self._sets[member]
        if (member, load) not in self._loaded:
            keyed = SeededSamples(dataset, seed=self._seed)
            loaded = theirs(self._task, member, lambda: [keyed[place] for place in places])
            self._loaded[member, load] = copied(loaded)
            self._first.setdefault(member, loaded)
            kept = self._loaded[member, 0]
            wrong = fault(kept, self._first[member], loaded, changed=self._changed)
            if load and wrong:
                name = member.removeprefix(EVALUATED).strip("[']")
                of = "the training set" if member == TRAINED else f"the data set {name}"
                self._wrong[member] = f"{of} {wrong}"
        if not numbers:
            return len(places), self._wrong.get(member, "")
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


class Wrapped(nn.Module):
    """A model as DDP presents it, without communication: it can only be called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"under DDP the model is wrapped, and has no {name!r}: call model(...), and do "
                "what you need in its forward"
            ) from None


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


class Pass(NamedTuple):
    """Result of one forward and backward."""

    loss: float
    outputs: dict[str, Any]
    draws: bool
    others: bool  # whether Python's or numpy's generator was used
    flops: float
    units: list[str]  # FSDP2 units that ran
    unused: list[str]
    sparse: list[str]  # parameters whose gradient is sparse
    gradients: dict[str, tuple[float, float]]
    """see :func:`projections`"""


@dataclass
class Others:
    """Whether training draws from Python's or numpy's generator, as far as is known.

    A checkpoint keeps it, so that a resumed run seeds these generators if the run did.
    """

    drawn: bool = False
    drew: bool = False  # whether a step of this rank was the first that drew: not yet reported
    before: tuple[Any, ...] | None = None  # their states before a forward that is watched

    def watch(self) -> None:
        """Watch the forward and backward that follow, unless it is known that they draw."""
        if not self.drawn:
            self.before = other_states()

    def look(self) -> None:
        """Find out whether a watched forward or backward drew."""
        if self.before is not None:
            self.drew = self.drawn = self.before != other_states()
            self.before = None

    def state_dict(self) -> dict[str, bool]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.drawn = self.drawn or state["drawn"]


def one_pass(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    checks: Checks,
    samples: Samples,
    *,
    backward: bool = True,
    seed: int = 0,
) -> Pass:
    """Run forward and backward over samples, with the same seeds each time.

    Args:
        contract: checks the task.
        job: what the recipe describes.
        run: this process.
        model: not wrapped by DDP.
        checks: around the micro-batch.
        samples: of one load.
        backward: whether to compute gradients.
        seed: a different seed gives different random numbers.

    Returns:
        What was computed, and which parts of the model ran.
    """
    with restored(model, run.device), Operations(modules=run.sharded) as operations:
        reseed(run.device, job.recipe.seed, seed, others=True)
        batch, _ = make_batch(contract, run, samples)

        # Forward and backward.
        before = random_states(run.device)
        checks.begin()
        loss, outputs = contract.loss(model, batch)
        draws = has_drawn(before, run.device)
        operations.backward = True
        raw = theirs(job.task, "loss", lambda: gradients_of(loss, model)) if backward else {}
        checks.end()
        others = other_states() != before[1]

        # Measure the gradients before they are dropped.
        unused = [name for name, gradient in raw.items() if gradient is None]
        sparse = [name for name, one in raw.items() if one is not None and local(one).is_sparse]
        gradients = projections(raw)
    units = checks.units.calls
    checks.units.calls = []
    return Pass(
        loss=float(loss.detach()),
        outputs=outputs,
        draws=draws,
        others=others,
        flops=operations.total,
        units=units,
        unused=unused,
        sparse=sparse,
        gradients=gradients,
    )


def gradients_of(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of trained parameters.

    Bypass DDP's hooks, which would count this backward as a step's.
    """

    def named() -> Iterator[tuple[str, nn.Parameter]]:
        return ((bare_name(name), p) for name, p in model.named_parameters() if p.requires_grad)

    if isinstance(model, Wrapped):
        names, parameters = zip(*named(), strict=True)
        try:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
            return dict(zip(names, gradients, strict=True))
        except RuntimeError as error:
            # reentrant checkpointing allows nothing but backward()
            if "heckpoint" not in str(error):
                raise
    loss.backward()
    # FSDP2 has resharded the gradients by now
    return {name: parameter.grad for name, parameter in named()}


def projections(
    gradients: Mapping[str, torch.Tensor | None],
) -> dict[str, tuple[float, float]]:
    """Return for each gradient its product with fixed vectors, and its norm.

    They are those of this rank's shard. Two gradients that differ have different products, also if
    their sums are equal.
    """
    found = {}
    for name, gradient in gradients.items():
        if gradient is None:
            continue
        mine = local(gradient.detach())
        values = as_real(mine.coalesce().values() if mine.is_sparse else mine)
        matrix = values.flatten(1) if values.ndim > 1 else values.reshape(-1, 1)
        if matrix.dtype in (torch.float16, torch.bfloat16):
            matrix = matrix.float()
        # fixed, and without structure that a gradient may have
        wide = wide_dtype(matrix.device)
        rows, columns = (
            torch.arange(size, dtype=wide, device=matrix.device).cos() for size in matrix.shape
        )
        product = (matrix @ columns.to(matrix.dtype)) * rows
        norm = torch.linalg.vector_norm(matrix)
        found[name] = float(product.sum()), float(norm)
    return found
