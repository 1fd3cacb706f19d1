"""What the questions before a run share: task, model and first samples, and passes over them."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.basics.seeds import random_states, reseed
from oneloop.checks.passes import Pass, Wrapped, run_pass
from oneloop.checks.samples import TRAINED, TrialSamples, read_samples
from oneloop.checks.state import Values, restored
from oneloop.checks.tolerance import rounding_of
from oneloop.data.sample_reader import CannotSend, Reader, sample_reader
from oneloop.data.step_batches import Batch, to_device
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.processes import Run
from oneloop.machine.fsdp2_units import Units
from oneloop.measure.flops import Operations
from oneloop.task_protocol.contract import Contract
from oneloop.task_protocol.user_code import theirs


@dataclass
class DryRun:
    """Runs the task on the first samples, the same on all ranks.

    Args:
        contract: calls and checks the task.
        job: what the recipe describes.
        run: this process.
        root: the model, bare or sharded by FSDP2.
        read: calls :func:`oneloop.checks.samples.read_samples` with the data sets.
        values: the attributes of model, task and data sets as they were.
    """

    contract: Contract
    job: Job
    run: Run
    root: nn.Module
    read: Reader
    values: Values

    def __post_init__(self) -> None:
        contract = self.contract
        wrapped = self.run.ranks > 1 and not self.run.sharded
        self.model = Wrapped(self.root) if wrapped else self.root  # as the loss gets it
        self.units = Units(self.root)  # which FSDP2 units run
        self.rounding = rounding_of(self.job, self.run, self.root)
        self.draws = False  # whether the model or the loss draw random numbers in training

        self.samples = range(self.read(TRAINED)[0])  # positions of the training samples
        self.micro_batch = self.samples[: max(self.job.layout.each, 1 + contract.whole)]

        # The answers to the questions.
        self.found = Preflight(
            additive=contract.additive or contract.whole,
            draws_others=self.job.tried.draws_others,
        )

    def batch(
        self, numbers: Sequence[int], *, name: str = TRAINED, load: int = 0, seed: int = 0
    ) -> Batch:
        """Collate samples, and seed all generators; return the batch on the device.

        Args:
            numbers: positions among the first samples.
            name: of the data set.
            load: 1 for the samples of the second load.
            seed: a different seed gives different random numbers.
        """
        found = self.found
        try:
            batch, self.weight, draws = self.read(name, numbers, load, seed)
        except CannotSend as error:
            raise self.contract.wrong(
                "collate",
                f"returned a batch that a data worker cannot send ({error})",
                "return tensors, or load the data without workers (--machine.workers 0)",
            ) from error
        if draws and name == TRAINED:
            found.draws = found.collate_draws = True
        reseed(self.run.device, self.job.recipe.seed, seed, others=True)
        self.seeded = random_states(self.run.device)
        return to_device(batch, self.run.device)

    def drew(self) -> bool:
        """Return whether random numbers were drawn since the last batch was collated."""
        return self.seeded != random_states(self.run.device)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set; under FSDP2, on any rank: passes are collective."""
        return self.run.any(flag) if self.run.sharded else flag

    def train(self, batch: Batch, operations: Operations | None = None) -> Pass:
        """Run forward and backward over a batch. Under FSDP2 it is collective.

        Args:
            batch: of :meth:`batch`, which has just set seeds.
            operations: counts those of forward and backward in its context.

        Raises:
            Inexact: FSDP2 would drop what the forward changes, or a gradient is sparse.
        """

        def loss_of() -> Tensor:
            loss, self.outputs = self.contract.loss(self.model, batch)
            if operations is not None:
                operations.backward = True
            return loss

        self.units.forget()
        result: Pass = theirs(self.job.task, "loss", partial(run_pass, self.model, loss_of))
        return result


@contextmanager
def dry_run(job: Job, run: Run, model: nn.Module) -> Iterator[DryRun]:
    """Yield a dry run, which leaves no trace. Collective: call on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        model: bare, or sharded by FSDP2.
    """
    contract = Contract(job.task)

    # Load the first samples, where the run reads its data.
    workers = run.workers(job.recipe.machine.workers)
    device = torch.device("cpu") if workers else run.device
    samples = {name: TrialSamples(job, name, device) for name in job.sets}

    # Compiled modules run eagerly: the samples here have other shapes than those of the run.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()

    others = {"task": job.task}
    for name, dataset in job.sets.items():
        others[f"data set {name}"] = dataset
    restoring = restored(run.device, model, others)
    with sample_reader(partial(read_samples, samples), workers=workers) as read:
        try:
            with restoring as values, _task_state_restored(contract), eager:
                dry = DryRun(contract, job, run, model, read, values)
                with dry.units.closing:
                    yield dry
        except Inexact as error:
            raise BadInput(str(error)) from None
        except BadInput as error:
            if run.sharded and isinstance(error.__cause__, RuntimeError):
                raise BadInput(
                    f"{error}; if it runs with ddp.yaml, FSDP2 does not support this model"
                ) from error
            raise


@contextmanager
def _task_state_restored(contract: Contract) -> Iterator[None]:
    """Restore the state of a task that has state_dict()."""
    if not hasattr(contract.task, "state_dict"):
        yield
        return
    before = contract.state()
    yield
    contract.call("load_state_dict", before)
    if contract.state() != before:
        raise contract.wrong(
            "load_state_dict",
            "did not restore what state_dict() returned",
            "restore the whole state",
        )
