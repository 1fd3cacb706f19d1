"""Lines of the start-up log: batch sizes, precision, and how exactly the run can be reproduced."""

import os
from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from oneloop.ema import EMA
from oneloop.job.build import Job
from oneloop.job.preflight import Preflight
from oneloop.launch.environment import computed_by
from oneloop.launch.processes import Run
from oneloop.machine.blocks import has_batch_statistics, has_dropout
from oneloop.machine.mixed_precision import HALF
from oneloop.machine.replicas import replica_group
from oneloop.tasks.evaluation_metrics import prefix

_IGNORED: dict[str, tuple[str, ...]] = {
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("1",),
    "FSDP_STATE_DICT_TYPE": ("SHARDED_STATE_DICT",),
}
_IGNORED |= {"FSDP_CPU_RAM_EFFICIENT_LOADING": ("false", "False"), "XLA_DOWNCAST_BF16": ("0",)}
_IGNORED |= {"ACCELERATE_DOWNCAST_BF16": ("false",)}
"""settings of accelerate that oneloop ignores, and the values that have no effect anyway"""
DEPENDS = "another parallel layout trains a different model; the same layout is bit-identical"


def start_lines(
    job: Job, run: Run, model: nn.Module, optimizer: Optimizer, emas: Sequence[EMA], seen: Preflight
) -> Iterator[str]:
    """Yield the lines of the start-up log."""
    recipe, layout, number = job.recipe, job.layout, job.built.number
    strategy = "FSDP2" if run.sharded else "DDP" if run.ranks > 1 else "one process"
    sizes, precision = (
        f"{number:,} parameters, {len(job.train_set):,} samples",
        run.accelerator.mixed_precision,
    )
    yield f"{recipe.name}: {sizes}, {strategy} on {run.device.type}, {precision} mixed precision"
    means = (
        f", log lines are means of {every:,}" if (every := job.intervals.every["log"]) > 1 else ""
    )
    yield (
        f"{layout}; {job.steps:,} steps ({recipe.duration}, {job.steps * layout.size:,} "
        f"samples){means}"
    )
    yield (
        f"{recipe.optimizer.name}, learning rate {job.rate.peak:.3g} at most; schedule "
        f"{recipe.schedule.name}"
    )
    if job.eval_sets:
        sets = (
            f"{name} {len(part):,} samples ({prefix(name)}/…)"
            for name, part in job.eval_sets.items()
        )
        yield f"evaluation data: {', '.join(sets)}"
    if recipe.eval.best != "eval/loss":
        yield f"eval.best {recipe.eval.best}: {'larger' if job.upward else 'smaller'} is better"
    yield _promise(job, run, model, seen)
    if about := getattr(job.train_set, "about", lambda: None)():
        yield f"data: {about}"
    yield from getattr(job.task, "notes", ())
    if seen.unused:
        first = ", ".join(seen.unused[:3])
        yield f"parameters without a gradient in the preflight check: {len(seen.unused)} ({first})"
    if job.exact and run.sharded:
        moved = layout.accumulate * 4 * number / 2**20
        half = run.accelerator.mixed_precision in HALF
        weights = (
            "; half precision is autocast, and weights are gathered in float32: twice the bytes"
            if half
            else ""
        )
        yield (
            f"batch.grain under FSDP2: {moved:,.1f} MiB of gradients are exchanged per step, none "
            f"kept whole{weights}"
        )
    elif run.sharded and layout.accumulate > 1:
        held, moved = 4 * number / 2**20, layout.accumulate * 4 * number / 2**20
        if recipe.machine.sync_each_batch:
            yield (
                f"machine.sync_each_batch: {moved:,.1f} MiB of gradients are scattered per step, "
                "none kept whole"
            )
        else:
            keeps = f"each process keeps whole gradients between micro-batches: {held:,.1f} MiB"
            yield (
                f"{keeps}; machine.sync_each_batch true keeps none, and scatters {moved:,.1f} MiB "
                "per step"
            )
    yield from job.built.notes
    if ignored := [
        name
        for name, effective in _IGNORED.items()
        if os.environ.get(name, effective[0]) not in effective
    ]:
        names = ", ".join(f"{name}={os.environ[name]}" for name in ignored)
        yield (
            f"accelerate's {names} has no effect: oneloop has batch.micro, its own checkpoints and "
            "machine.in_turn"
        )
    if emas:
        yield f"EMA weights: {', '.join(ema.name for ema in emas)}"
    if run.ranks > 1 and "check" in job.intervals:
        if replica_group(model) is None:
            yield (
                "machine.check_every: every process has its own shard (FSDP2), so there are no "
                "replicas to compare"
            )
        else:
            yield (
                "the processes compare weights and optimizer state every "
                f"{job.intervals.every['check']:,} steps"
            )
    if matrices := [
        p for group in optimizer.param_groups if group.get("muon") for p in group["params"]
    ]:
        yield f"muon updates {len(matrices)} matrices, adamw the rest"


def _promise(job: Job, run: Run, model: nn.Module, seen: Preflight) -> str:
    if job.exact:
        leaves, about = job.layout.size // job.layout.each, computed_by(job.recipe, run.device)
        same = f"bit-identical on 1 to {leaves} processes (powers of two), sharded or not"
        kind = f"device ({about['device']}) and versions (torch {about['versions']['torch']}, …)"
        return f"batch.grain {job.layout.each}: {same}, on the same {kind}"
    if seen.stateful and not seen.moved:
        why = "the data set, the model or the loss keeps its own generator or counter"
        fix = (
            "so another parallel layout or a resume trains a different model; use torch's global "
            "generator"
        )
        return f"the same samples and seeds give a different loss: {why}, {fix}"
    if not seen.additive:
        return f"the task declares additive = False: its loss is not a sum over samples; {DEPENDS}"
    if has_batch_statistics(model):
        return f"the model has BatchNorm, whose statistics depend on the micro-batch; {DEPENDS}"
    if seen.moved:
        return f"a forward in training changes the {seen.moved}: {DEPENDS}"
    if not seen.linear:
        return (
            "the gradient of a batch is not the sum of its samples' (a hook or a custom "
            f"backward): {DEPENDS}"
        )
    if has_dropout(model) or seen.draws:
        what = (
            "the model has dropout"
            if has_dropout(model)
            else "model, loss or collate draw random numbers"
        )
        return (
            f"{what}: another parallel layout draws other random numbers; the same layout is "
            "bit-identical"
        )
    same = (
        "the same gradients (relative difference up to "
        f"1e-{12 if job.recipe.machine.dtype == 'float64' else 6})"
    )
    return (
        f"any parallel layout gives {same}, and a rerun on this one is bit-identical; check: "
        "oneloop prove"
    )
