"""Preflight check: run a few real samples through task and model before anything is written, and
report errors early.

It also measures the FLOPs of a sample, and finds random draws and unused parameters. Afterwards it
restores buffers, gradients and random states.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from oneloop.basics.exit_codes import BadInput, Inexact
from oneloop.checkpoint.weights import bare
from oneloop.data.seeded_samples import SeededSamples
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.trial_passes import (
    Pass,
    Samples,
    Wrapped,
    has_drawn,
    make_batch,
    one_pass,
    random_states,
    restored,
)
from oneloop.launch.processes import Run
from oneloop.machine.blocks import DROPOUT, has_batch_statistics, has_dropout
from oneloop.machine.layout_checks import Checks, changed, content, other_units
from oneloop.measure.meter import OWN_METRICS
from oneloop.show.graph import Drawing
from oneloop.tasks.protocol_checks import Contract, theirs
from oneloop.tasks.whole_batch import check_loss, check_rows, columns_of, parts_of

SAMPLED = 4  # maximum number of samples; each is loaded twice


@dataclass(frozen=True)
class Preflight:
    """Result of the preflight check."""

    flops: float = 0.0  # floating-point operations of training on one sample
    additive: bool = True  # whether the loss of a batch is the sum of its samples' losses
    draws: bool = False  # whether collate, model or loss draw random numbers in training
    metrics: tuple[str, ...] = ()  # names of 0-dim outputs of the loss in training
    unused: list[str] = field(default_factory=list)  # trained parameters that the loss does not use
    moved: str = ""  # first buffer or parameter that a forward in training mode changes
    stateful: bool = False
    """whether the same samples and seeds gave a different loss: some object keeps its own generator
    or counter"""
    linear: bool = True  # whether the gradient of a batch is the sum of the gradients of its halves
    graph: Any = None  # the model graph for TensorBoard, on rank 0


def preflight(job: Job, run: Run, model: nn.Module) -> Preflight:
    """Run the task on the first samples of the run, the same on all ranks. Raise BadInput if the
    task is wrong.

    Collective: call on every rank."""
    model, contract = bare(model), Contract(job.task)
    if run.accelerator.scaler is not None:
        reject_half_parameters(model)
    if run.ranks > 1 and not run.sharded:
        model = Wrapped(model)
    number = min(SAMPLED, max(job.layout.each, 2 if contract.whole else 1), len(job.train_set))
    epochs, indices = job.order.at(np.arange(number))
    dataset = SeededSamples(job.train_set, seed=job.recipe.seed)

    def load() -> list[tuple[int, Any]]:
        positions = zip(epochs.tolist(), indices.tolist(), strict=True)
        loaded: list[tuple[int, Any]] = theirs(
            job.task, "train_set()", lambda: [dataset[position] for position in positions]
        )
        return loaded

    samples = load()
    try:
        # Compiled modules run eagerly: the samples here have other shapes than those of the run.
        eager = (
            torch.compiler.set_stance("force_eager")
            if "torch._dynamo" in sys.modules
            else nullcontext()
        )
        with restored(model, run.device), _task_state_restored(contract), eager:
            graph = _check_eval(contract, job, run, model, samples)
            return _check_training(contract, job, run, model, samples, load(), graph)
    except BadInput as error:
        if run.sharded and isinstance(error.__cause__, RuntimeError):
            raise BadInput(
                f"{error}; if it runs with ddp.yaml, FSDP2 does not support this model"
            ) from error
        raise


def reject_half_parameters(model: nn.Module) -> None:
    """Raise BadInput if a trained parameter has a 16-bit dtype: fp16 loss scaling needs float32
    gradients."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            kind = str(parameter.dtype).removeprefix("torch.")
            raise BadInput(
                f"mixed_precision fp16 requires float32 parameters, but {name} is {kind}; return "
                "a float32 model from model(), or use mixed_precision no"
            )


def _check_eval(contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples) -> Any:
    """Check in eval mode: one sample, the same sample twice, and evaluation samples with metrics.
    Return the graph."""
    first = samples[0]
    tolerance = tolerance_of(job, run, model)
    if contract.whole:
        dropouts = nn.ModuleList(
            module for module in model.modules() if isinstance(module, DROPOUT)
        )
        # in eval mode; as in training
        for quiet in (model, *([] if has_batch_statistics(model) else [dropouts])):
            with evaluating(quiet):
                _check_parts(contract, job, run, model, samples)
    with evaluating(model):
        one, weight = make_batch(contract, job, run, [first])
        two, twice = make_batch(contract, job, run, [first, first])
        if (contract.additive or contract.whole) and not contract.draws:
            contract.check_doubling("weight", weight, twice, 1e-6)
        before = random_states(run.device)
        draw_graph = run.main and "tensorboard" in job.recipe.track
        inner = model.module if isinstance(model, Wrapped) else model
        with Drawing(inner, one) if draw_graph else nullcontext() as graph_drawing:
            once = float(contract.loss(model, one)[0])
        both = float(contract.loss(model, two)[0])
        contract.draws = contract.draws or has_drawn(before, run.device)
        if (
            contract.additive
            and not contract.draws
            and not contract.is_double(once, both, tolerance)
        ):
            # a repeat that differs comes from a private generator
            again = float(contract.loss(model, one)[0])
            contract.draws = abs(again - once) > tolerance * abs(once)
            if not contract.draws:
                contract.check_doubling("loss", once, both, tolerance)
        for dataset in job.eval_sets.values():
            evaluation_set = SeededSamples(dataset, seed=job.recipe.seed)
            positions = [(0, index) for index in range(min(SAMPLED, job.layout.each, len(dataset)))]
            evaluated = theirs(
                job.task,
                "eval_sets()",
                lambda: [evaluation_set[position] for position in positions],  # noqa: B023
            )
            evaluation_contract = Contract(job.task)  # whose batches may have other keys
            batch, _ = make_batch(evaluation_contract, job, run, evaluated, trained=False)
            outputs = evaluation_contract.loss(model, batch)[1]
            if contract.whole:  # an evaluation gives it nothing else
                batch, outputs = (
                    columns_of(job.task, batch),
                    parts_of(contract, model, batch, len(evaluated)),
                )
            evaluation_contract.check_metrics(batch, outputs, run.device)
            break
    return graph_drawing.graph if graph_drawing is not None else None


def _check_parts(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples
) -> None:
    """Check ``embed`` and ``batch_loss``: each sample alone, and all of them in both orders."""
    before = random_states(run.device)
    first, *alone = (
        parts_of(contract, model, make_batch(contract, job, run, [one])[0], 1)
        for one in samples[:1] + samples
    )
    batches = [make_batch(contract, job, run, samples[::step])[0] for step in (1, -1)]
    together, back = (parts_of(contract, model, batch, len(samples)) for batch in batches)
    if not contract.draws and not has_drawn(before, run.device):
        check_rows(contract, (together, back), alone, first, tolerance_of(job, run, model))
    check_loss(contract, together, columns_of(job.task, batches[0]))


def _check_training(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    reloaded: Samples,
    graph: Any,
) -> Preflight:
    """Check in training mode: forward and backward of a batch, its halves and the batch again, with
    the same seeds."""
    half, tolerance = len(samples) // 2, tolerance_of(job, run, model)
    no_halves = (
        not contract.additive or not half or has_batch_statistics(model) or has_dropout(model)
    )
    checks = Checks(
        model,
        parameters=run.ranks > 1 or job.exact,
        report=(moved := list[str]()).append,
        state=content,
    )
    run_pass = partial(one_pass, contract, job, run, model, checks)
    try:
        first = run_pass(samples)
        halves = [] if no_halves else [run_pass(samples[:half]), run_pass(samples[half:])]
        last = run_pass(reloaded)
        unit_error = other_units([one.units for one in (first, *halves, last)])
        # Which FSDP2 units run may depend on the sample.
        if len(set(first.units)) > 1 and not has_batch_statistics(model):
            unit_error = unit_error or other_units(
                [run_pass([one], backward=False).units for one in samples]
            )
    except Inexact as error:
        raise BadInput(str(error)) from None
    finally:
        checks.units.closing.close()
    stateful = not _near(first.loss, last.loss, 1e-3 * tolerance)
    _reject(job, run, last, moved, unit_error, (first.loss, last.loss) if stateful else None)
    draws, linear = contract.draws or any(one.draws for one in (first, *halves, last)), True
    if halves and not draws and not stateful:
        contract.check_sum(first.loss, [one.loss for one in halves], tolerance)
        # rounding, if a gradient is 0 (key biases)
        noise = 1e-4 * sum(size for _, size in last.gradients.values())
        linear = all(
            _near(
                total,
                sum(one.gradients.get(name, (0.0, 0.0))[0] for one in halves),
                10 * tolerance,
                size + noise,
            )
            for name, (total, size) in last.gradients.items()
        )
    result: dict[str, Any] = {
        "additive": contract.additive or contract.whole,
        "draws": draws,
        "stateful": stateful,
        "linear": linear,
    }
    result |= {
        "metrics": _metrics(contract, last.outputs),
        "unused": last.unused,
        "moved": moved[0] if moved else "",
    }
    return Preflight(flops=last.flops / len(samples), graph=graph, **result)


def _near(a: float, b: float, tolerance: float, size: float | None = None) -> bool:
    """Whether a and b are equal up to ``tolerance``, relative to ``size`` (default: a). True if one
    is not finite."""
    return not math.isfinite(a + b) or abs(a - b) <= tolerance * (abs(a) if size is None else size)


def _reject(
    job: Job, run: Run, last: Pass, moved: list[str], units: str, losses: tuple[float, float] | None
) -> None:
    """Raise BadInput for a model whose training would depend on the parallel layout. ``moved``:
    buffers that a forward changed; ``units``: an FSDP2 error; ``losses``: two different losses of
    the same samples and seeds."""
    if units:
        raise BadInput(units)
    if job.exact and moved:
        raise BadInput(
            f"batch.grain requires the same buffers on every process, but {changed(moved[0])}"
        )
    if job.exact and losses:
        values = f"got {losses[0]:.9g} and {losses[1]:.9g}"
        why = "the data set, the model or the loss keeps its own generator or counter"
        requirement = (
            "batch.grain requires that the same samples with the same seeds give the same loss"
        )
        raise BadInput(
            f"{requirement}; {values}: {why}. Use torch's global generator, or remove batch.grain"
        )
    if last.sparse:
        raise BadInput(
            f"the gradient of {last.sparse[0]} is sparse, which is not supported; set sparse=False"
        )
    unused = last.unused
    if (
        unused
        and run.ranks > 1
        and not run.sharded
        and not job.recipe.machine.find_unused_parameters
    ):
        names = (
            f"{', '.join(unused[:3])}{f' and {len(unused) - 3} more' if len(unused) > 3 else ''}"
        )
        advice = (
            "freeze them (requires_grad_(False) in model()), or set "
            "--machine.find_unused_parameters true"
        )
        raise BadInput(
            f"the loss does not use {names}, so DDP would wait for their gradients; {advice}"
        )


def metric_names(outputs: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the real 0-dim outputs, which are logged as metrics, without ``loss``."""
    numbers = {
        name: value for name, value in outputs.items() if torch.is_tensor(value) and not value.ndim
    }
    return tuple(
        name for name, value in numbers.items() if name != "loss" and not value.is_complex()
    )


def _metrics(contract: Contract, outputs: dict[str, Any]) -> tuple[str, ...]:
    names = metric_names(outputs)
    for name in names:
        if f"train/{name}" in OWN_METRICS:
            raise contract.wrong(
                "loss",
                f"returned the output {name!r}",
                f"oneloop also logs train/{name}: rename it",
            )
    return names


def tolerance_of(job: Job, run: Run, model: nn.Module) -> float:
    """Return the relative tolerance for rounding of sums."""
    narrow = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    if narrow or run.accelerator.mixed_precision != "no" or job.recipe.machine.matmul != "highest":
        return 3e-2
    return 1e-9 if job.dtype is torch.float64 else 1e-4


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
