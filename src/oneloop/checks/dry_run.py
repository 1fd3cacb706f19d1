"""What the questions before a run share: task, model and first samples, and passes over them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.basics.seeds import random_states, reseed
from oneloop.basics.tensors import restored_buffers
from oneloop.checks.contract import Contract
from oneloop.checks.passes import Measure, Pass, Wrapped, run_pass
from oneloop.checks.samples import TRAINED, TrialSamples
from oneloop.checks.state import Values, restored, state_hashes
from oneloop.data.sample_reader import CannotSend, SampleReader
from oneloop.data.step_batches import Batch, transferred
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.machine.fsdp2_units import Units
from oneloop.measure.flops import Operations
from oneloop.task_protocol.user_code import theirs


class TrialPass(NamedTuple):
    """Result of one forward and backward over some samples."""

    loss: float
    outputs: dict[str, Any]
    gradients: dict[str, Measure]  # by parameter; those that the loss does not use are missing
    draws: bool  # whether random numbers were drawn
    others: bool  # whether Python's or numpy's generator was used
    units: list[str]  # FSDP2 units that ran
    hashes: dict[str, int]  # of the model's tensors after the pass, if asked
    flops: float  # floating-point operations, if asked


@dataclass
class DryRun:
    """Runs the task on the first samples, the same on all ranks.

    Args:
        contract: calls and checks the task.
        job: what the recipe describes.
        run: this process.
        root: the model, bare or sharded by FSDP2.
        model: the same, as the loss gets it.
        read: calls :class:`oneloop.checks.samples.TrialSamples`.
        values: the attributes of model, task and data sets as they were.
        units: record which FSDP2 units run.
    """

    contract: Contract
    job: Job
    run: Run
    root: nn.Module
    model: nn.Module
    read: SampleReader
    values: Values
    units: Units

    def __post_init__(self) -> None:
        self.number: int = self.read(TRAINED)[0]  # of training samples
        least = 2 if self.contract.whole else 1
        self.micro_batch = range(min(self.number, max(self.job.layout.each, least)))

    def batch(
        self, numbers: Sequence[int], *, member: str = TRAINED, load: int = 0, seed: int = 0
    ) -> tuple[Batch, float]:
        """Seed all generators, and collate samples; return the batch on the device and its weight.

        Args:
            numbers: positions among the first samples.
            member: method of the task that returned the data set.
            load: 1 for the samples of the second load.
            seed: a different seed gives different random numbers.
        """
        contract = self.contract
        reseed(self.run.device, self.job.recipe.seed, seed, others=True)
        try:
            batch, weight, draws = self.read(member, numbers, load)
        except CannotSend as error:
            raise contract.wrong(
                "collate",
                f"returned a batch that a data worker cannot send ({error})",
                "return tensors, or load the data without workers (--machine.workers 0)",
            ) from error
        if member == TRAINED:
            contract.draws = contract.draws or draws
            contract.collate_draws = contract.collate_draws or draws
        return next(transferred(iter([batch]), self.run.device)), weight

    def train(self, batch: Batch, *, backward: bool = True, closely: bool = False) -> TrialPass:
        """Run forward and backward over a batch; restore buffers.

        Under FSDP2 it is collective: call it on every rank.

        Args:
            batch: of :meth:`batch`, just after it has set seeds.
            backward: whether to compute gradients.
            closely: count operations, and hash the model's tensors.

        Raises:
            Inexact: FSDP2 would drop what the forward changes, or a gradient is sparse.
        """
        model = self.model
        operations = Operations(modules=self.run.sharded) if closely else None
        call = partial(
            run_pass,
            model,
            partial(self.contract.loss, model, batch),
            backward=backward,
            operations=operations,
        )
        before = random_states(self.run.device)
        self.units.forget()
        with restored_buffers(model):
            result: Pass = theirs(self.job.task, "loss", call)
            hashes = state_hashes(model) if closely else {}
        after = random_states(self.run.device)
        flops = operations.total if operations else 0.0
        return TrialPass(
            *result, before != after, before[1] != after[1], self.units.calls, hashes, flops
        )

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set; under FSDP2, on any rank: passes are collective."""
        return self.run.any(flag) if self.run.sharded else flag


def differing(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Return the names of tensors that have other hashes, that are new, or that are gone."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


@contextmanager
def dry_run(job: Job, run: Run, model: nn.Module) -> Iterator[DryRun]:
    """Yield a dry run, which leaves no trace. Collective: call on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        model: bare, or sharded by FSDP2.
    """
    contract = Contract(job.task)
    wrapped = run.ranks > 1 and not run.sharded

    # Load the first samples, where the run reads its data.
    workers = run.workers(job.recipe.machine.workers)
    samples = TrialSamples(job, None if workers else run.device)

    # Compiled modules run eagerly: the samples here have other shapes than those of the run.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    restoring = restored(run.device, model=model, **_objects(job))
    with SampleReader(samples, workers=workers) as read:
        try:
            with restoring as values, _task_state_restored(contract), eager:
                seen = Wrapped(model) if wrapped else model
                units = Units(model)
                with units.closing:
                    yield DryRun(contract, job, run, model, seen, read, values, units)
        except Inexact as error:
            raise BadInput(str(error)) from None
        except BadInput as error:
            if run.sharded and isinstance(error.__cause__, RuntimeError):
                raise BadInput(
                    f"{error}; if it runs with ddp.yaml, FSDP2 does not support this model"
                ) from error
            raise


def _objects(job: Job) -> dict[str, Any]:
    """Return the objects beside the model that the task's code may change."""
    return {"task": job.task, **{f"data set {name}": part for name, part in job.sets.items()}}


@contextmanager
def _task_state_restored(contract: Contract) -> Iterator[None]:
    """Restore the state of a task that has state_dict()."""
    if not hasattr(contract.task, "state_dict"):
        yield
        return
    before = contract.state()
    yield
    theirs(contract.task, "load_state_dict", lambda: contract.task.load_state_dict(before))
    if contract.state() != before:
        raise contract.wrong(
            "load_state_dict",
            "did not restore what state_dict() returned",
            "restore the whole state",
        )
