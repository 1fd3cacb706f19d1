"""Preflight check: run a few real samples through task and model before anything is written.

It reports errors early, measures the FLOPs of a sample, and finds random draws and unused
parameters. Afterwards it restores what this has changed (:mod:`oneloop.job.restore`).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.checkpoint.optimizer_trial import try_shards
from oneloop.checkpoint.weights import bare
from oneloop.data.sample_reader import SampleReader
from oneloop.job.build import Job
from oneloop.job.check_evaluation import check_evaluation
from oneloop.job.check_training import check_training
from oneloop.job.preflight_result import Preflight
from oneloop.job.restore import all_restored
from oneloop.job.trial_passes import Wrapped
from oneloop.job.trial_samples import TRAINED, TrialSamples, check_sets, load_samples
from oneloop.launch.processes import Run
from oneloop.machine.mixed_precision import reject_half_parameters
from oneloop.task_protocol.protocol_checks import Contract, theirs


def preflight(job: Job, run: Run, model: nn.Module) -> Preflight:
    """Run the task on the first samples of the run, the same on all ranks.

    Collective: call on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.

    Returns:
        What the run needs to know about task and model.

    Raises:
        BadInput: the task is wrong.
    """
    model = bare(model)
    if run.sharded:
        try_shards(job.make_optimizer, next(model.parameters()), job.rate.scheduled)
    contract = Contract(job.task)
    if run.accelerator.scaler is not None:
        reject_half_parameters(model)
    if run.ranks > 1 and not run.sharded:
        model = Wrapped(model)

    # Load the first samples, where the run reads its data.
    workers = run.workers(job.recipe.machine.workers)
    trial = TrialSamples.first(job, None if workers else run.device)

    # Compiled modules run eagerly: the samples here have other shapes than those of the run.
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    others = {"task": job.task, **{f"data set {name}": part for name, part in job.sets.items()}}
    with SampleReader(trial, workers=workers) as reader:
        try:
            restoring = all_restored(model, run.device, others)
            with restoring as before, _task_state_restored(contract), eager:
                samples, _ = load_samples(reader, TRAINED, 0)
                notes = check_sets(job, reader)
                graph = check_evaluation(contract, job, run, model, samples, notes, before)
                again, wrong = load_samples(reader, TRAINED, 1)
                seen = check_training(contract, job, run, model, samples, again, wrong)
                seen.others.drawn |= job.tried.draws_others
                return replace(seen, graph=graph, notes=[*notes, *job.tried.notes])
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
    theirs(contract.task, "load_state_dict", lambda: contract.task.load_state_dict(before))
    if contract.state() != before:
        raise contract.wrong(
            "load_state_dict",
            "did not restore what state_dict() returned",
            "restore the whole state",
        )
