"""Lines of the start-up log: batch sizes, precision, and how exactly the run can be reproduced."""

import os
from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from oneloop.checks.repeats import DEPENDS
from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.devices import unused
from oneloop.launch.processes import Run
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.mixed_precision import HALF
from oneloop.run.environment import computed_by
from oneloop.task_protocol.evaluation_metrics import prefix

_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def start_lines(
    job: Job,
    run: Run,
    model: nn.Module,
    optimizer: Optimizer,
    emas: Sequence[EMA],
    trial: Preflight,
) -> Iterator[str]:
    """Yield the lines of the start-up log.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.
        optimizer: of its trained parameters.
        emas: EMAs of its weights.
        trial: what the preflight check found out.
    """
    recipe = job.recipe
    layout = job.layout

    # Model and processes.
    if run.sharded:
        strategy = "FSDP2"
    elif run.ranks > 1:
        strategy = "DDP"
    else:
        strategy = "one process"
    sizes = f"{job.built.number:,} parameters, {len(job.train_set):,} samples"
    precision = run.accelerator.mixed_precision
    yield f"{recipe.name}: {sizes}, {strategy} on {run.device.type}, {precision} mixed precision"

    # Batch and steps.
    samples = f"{job.steps * layout.size:,} samples"
    steps = f"{layout}; {job.steps:,} steps ({recipe.duration}, {samples})"
    every = job.intervals.every["log"]
    if every > 1:
        steps += f", metrics are means of {every:,} (at most one log line per second)"
    yield steps

    # Optimizer and schedule.
    yield (
        f"{recipe.optimizer.name}, learning rate {job.rate.peak:.3g} at most; schedule "
        f"{recipe.schedule.name}"
    )

    # Evaluation.
    sets = [
        f"{name} {len(part):,} samples ({prefix(name)}/…)" for name, part in job.eval_sets.items()
    ]
    if sets:
        yield f"evaluation data: {', '.join(sets)}"
    if recipe.eval.metric != "eval/loss":
        direction = "larger" if job.upward else "smaller"
        yield f"eval.best {recipe.eval.metric}: {direction} is better"

    # How exactly can it be reproduced?
    yield _promise(job, run, model, trial)
    yield from trial.notes

    # Remarks of the data and of the task.
    about = getattr(job.train_set, "about", lambda: None)()
    if about:
        yield f"data: {about}"
    traffic = getattr(job.train_set, "traffic", None)
    if traffic:
        hosts = run.ranks // run.local_ranks
        yield traffic.line(len(job.train_set), batch=layout.size, steps=job.steps, hosts=hosts)
    yield from getattr(job.task, "notes", ())
    if trial.unused:
        first = ", ".join(trial.unused[:3])
        yield f"parameters without a gradient in the preflight check: {len(trial.unused)} ({first})"

    # How the machine computes it.
    yield from unused(run.device)
    yield from job.built.notes
    accumulation = os.environ.get(_ACCUMULATION, "1")
    if accumulation != "1":
        yield f"accelerate's {_ACCUMULATION}={accumulation} has no effect: set batch.micro"
    if emas:
        yield f"EMA weights: {', '.join(ema.name for ema in emas)}"
    if "check" not in job.intervals.every:
        yield (
            "machine.check_every 0: nothing compares weights, buffers and repeated micro-batches "
            "while the run trains, so a model that changes its own state may train otherwise on "
            "another parallel layout"
        )
    matrices = sum(len(group["params"]) for group in optimizer.param_groups if group.get("muon"))
    if matrices:
        yield f"muon updates {matrices} matrices, adamw the rest"


def _promise(job: Job, run: Run, model: nn.Module, trial: Preflight) -> str:
    """Return the line on how exactly this run can be reproduced, also on another layout."""
    if job.exact:
        leaves = job.layout.size // job.layout.each
        about = computed_by(job.recipe, run.device)
        return (
            f"batch.grain {job.layout.each}: bit-identical on 1 to {leaves} processes (powers of "
            f"two), sharded or not, on the same device ({about['device']}) and versions "
            f"(torch {about['versions']['torch']}, …)"
        )
    if trial.stateful and not trial.moved:
        return (
            f"{trial.stateful}, so another parallel layout or a resume trains a different model; "
            "use torch's global generator, and return copies from a data set"
        )

    # Is a rerun bit-identical? On a GPU, many kernels add in another order each time.
    machine = job.recipe.machine
    deterministic = machine.deterministic and not machine.cudnn_benchmark
    same = "a rerun on the same layout is bit-identical"
    if run.device.type == "mps":
        same = "a rerun may differ by rounding (bit-identical only with machine.device cpu)"
    elif run.device.type != "cpu" and not deterministic:
        same += " only with machine.deterministic true"
        if run.device.type == "cuda":  # which other devices do not support
            same += " or batch.grain"
        if machine.cudnn_benchmark:
            same += ", and without machine.cudnn_benchmark"

    # What differs on another layout? Perhaps only rounding.
    other = _other_layout(model, trial)
    if other:
        return f"{other}; {same}"
    rounding = _rounding(job, run, model)
    return (
        f"any parallel layout gives the same gradients ({rounding}), and {same}; check: oneloop "
        "prove"
    )


def _rounding(job: Job, run: Run, model: nn.Module) -> str:
    """Return how far the gradients of two layouts are apart."""
    # Mixed precision, or weights in half precision.
    precision = run.accelerator.mixed_precision
    if precision in HALF:
        return (
            f"up to the rounding of {precision}, which autocast does at other places than FSDP2; "
            "1e-6 only in float32"
        )
    if precision != "no":
        return f"up to the rounding of {precision}; 1e-6 only in float32"
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            kind = str(parameter.dtype).removeprefix("torch.")
            return f"up to the rounding of {kind}, the dtype of weights; 1e-6 only in float32"

    # Wider weights.
    machine = job.recipe.machine
    if machine.dtype == "float64":
        return "relative difference up to 1e-12"
    if machine.matmul != "highest" and run.device.type == "cuda":
        return f"relative difference up to 1e-3, with machine.matmul {machine.matmul}"
    return "relative difference up to 1e-6"


def _other_layout(model: nn.Module, trial: Preflight) -> str:
    """Return why another layout trains a different model; an empty string if it does not."""
    if not trial.additive:
        return f"the task declares additive = False: its loss is not a sum over samples; {DEPENDS}"
    if has_batch_statistics(model):
        return f"the model has BatchNorm, whose statistics depend on the micro-batch; {DEPENDS}"
    if trial.moved:
        return f"a forward in training changes the {trial.moved[0]}: {DEPENDS}"
    if trial.not_summed:
        return (
            f"the gradient of {trial.not_summed} of a batch is not the sum of those of its samples "
            "(a hook, a custom backward, scale_grad_by_freq, or a small term of the loss): "
            f"{DEPENDS}"
        )
    if trial.collate_draws:
        return (
            "collate draws random numbers for a whole batch: another parallel layout draws others; "
            "draw them in data[index] (for collators of transformers: "
            "oneloop.tasks.language.drawn_samples.DrawnSamples)"
        )
    if trial.draws:
        return (
            "model, loss or collate draw random numbers (dropout): another parallel layout draws "
            "others"
        )
    return ""
