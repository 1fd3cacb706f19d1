"""Changes that save memory and keep the result: what each costs, and the cheapest one that fits."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from oneloop.tools.plan.asked import Asked
from oneloop.tools.plan.description import NotPlanned, Plan
from oneloop.tools.plan.gpus import Gpu
from oneloop.tools.plan.planned import planned

_HOST_LINK = 25e9  # bytes/s between device and host
_RECOMPUTE = {"selective": 0.05, "full": 1.0}  # additional share of the forward's FLOPs
_FUSED = 0.02  # additional share of the forward's FLOPs with task.fused_loss
_SMALLER = 0.005  # additional share of a step's FLOPs for each further part of a micro-batch


class Way(NamedTuple):
    """One way to save memory.

    The cost is predicted from the plan: FLOPs at half of the device's peak, bytes at the speed of
    links. What it saves is an upper bound: all that it could save."""

    words: tuple[str, ...]  # options and keys of the command
    seconds: float  # additional time of a step
    saves: float  # bytes


_NOTHING = Way((), 0.0, 0.0)
_SHARD = ("--config_file", "fsdp2")


class Change(NamedTuple):
    """A combination of ways."""

    words: tuple[str, ...]
    seconds: float  # predicted, per step
    least: float  # bytes that the run needs at least
    asked: Asked


@dataclass
class Fitting:
    """A change with which the run fits, as ``--json`` prints it."""

    words: list[str]
    command: str
    total: float  # bytes of one process
    seconds: float  # predicted, per step


def grid(asked: Asked, plan: Plan, gpu: Gpu) -> list[Change]:
    """Return all combinations of changes that do not change the result, the cheapest first."""
    # Take at most one alternative of each kind.
    kinds = []
    for ways in _WAYS:
        kinds.append([_NOTHING, *ways(plan, gpu)])
    found = []
    for chosen in product(*kinds):
        words: tuple[str, ...] = ()
        for way in chosen:
            words += way.words
        if words:
            seconds = sum(way.seconds for way in chosen)
            least = plan.memory.total - sum(way.saves for way in chosen)
            found.append(Change(words, seconds, least, _changed(asked, words)))
    # Of two equally cheap ones, the shorter command is first.
    return sorted(found, key=lambda change: (change.seconds, len(change.words)))


def _changed(asked: Asked, words: tuple[str, ...]) -> Asked:
    if words[:2] == _SHARD:
        asked = replace(asked, config_file="fsdp2")
        words = words[2:]
    return replace(asked, training=(*asked.training, *words))


def _shard(plan: Plan, gpu: Gpu) -> Iterator[Way]:
    """FSDP2 in place of DDP: each rank keeps its share of the state."""
    if not plan.sharded and plan.processes > 1:
        kept = plan.memory.kept
        state = kept["parameters"] + kept.get("optimizer", 0) + kept.get("EMA", 0)
        state += _gradients(plan)
        # It gathers the parameters in every micro-batch.
        seconds = plan.wire * plan.accumulate / gpu.link
        yield Way(_SHARD, seconds, state * (1 - 1 / plan.processes))


def _sync(plan: Plan, gpu: Gpu) -> Iterator[Way]:
    """A reduce-scatter after each micro-batch, so that no rank keeps whole gradients."""
    more = plan.accumulate - 1  # reduce-scatters
    if plan.sharded and more and not plan.sync_each_batch and not plan.exact:
        seconds = plan.sent("reduce-scatter") * more / gpu.link
        yield Way(("--machine.sync_each_batch", "true"), seconds, _gradients(plan))


def _fuse(plan: Plan, gpu: Gpu) -> Iterator[Way]:
    """A loss that never holds all logits."""
    if plan.fused_loss == "auto":
        seconds = _FUSED * plan.flops["forward"] / gpu.flops
        yield Way(("--task.fused_loss", "true"), seconds, _activations(plan))


def _smaller_micro(plan: Plan, gpu: Gpu) -> Iterator[Way]:
    """A smaller micro-batch, unless it changes the result."""
    if plan.exact or plan.batch_statistics:
        return
    # Each further part starts every kernel, and gathers the parameters, once more.
    each = _SMALLER * plan.total_flops / gpu.flops + plan.sent("all-gather") / gpu.link
    parts = 2
    while parts <= plan.micro and plan.micro % parts == 0:
        words = ("--batch.micro", str(plan.micro // parts))
        yield Way(words, (parts - 1) * each, _activations(plan) * (1 - 1 / parts))
        parts *= 2


def _eval_micro(plan: Plan, _: Gpu) -> Iterator[Way]:
    """A smaller micro-batch of the evaluation, if that needs more memory than the step."""
    evaluation = plan.memory.evaluation
    if evaluation is not None and evaluation.peak > plan.memory.step.peak:
        for size in sorted({1, (plan.micro + 3) // 4, plan.micro}):
            yield Way(("--eval.micro", str(size)), 0.0, _activations(plan))


def _recompute(plan: Plan, gpu: Gpu) -> Iterator[Way]:
    """Activation checkpointing of the blocks."""
    if plan.blocks and plan.recompute == "none":
        for mode, share in _RECOMPUTE.items():
            seconds = share * plan.flops["forward"] / gpu.flops
            yield Way(("--machine.recompute", mode), seconds, _activations(plan))


def _ema_on_host(plan: Plan, _: Gpu) -> Iterator[Way]:
    """EMA weights in host memory."""
    size = plan.memory.kept.get("EMA", 0)
    if size:
        yield Way(("--ema.device", "cpu"), size / _HOST_LINK, size)


# The order of the words in a command; FSDP2 must be the first.
_WAYS = (_shard, _sync, _fuse, _smaller_micro, _eval_micro, _recompute, _ema_on_host)


def _gradients(plan: Plan) -> int:
    return plan.memory.step.kinds.get("gradients", 0)


def _activations(plan: Plan) -> int:
    """Return the bytes of activations and temporaries in the phase that has more of them."""
    sizes = []
    for phase in plan.memory.phases().values():
        size = 0
        for kind, number in phase.kinds.items():
            if kind.startswith(("activations", "temporaries")):
                size += number
        sizes.append(size)
    return max(sizes)


def cheapest(asked: Asked, plan: Plan, gpu: Gpu, name: str) -> Fitting | None:
    """Plan the changes again, the cheapest first; return the first one that fits, or None.

    Args:
        asked: What was planned.
        plan: Its plan, which does not fit.
        gpu: The device.
        name: The device as the value of ``--gpu``, for the command.
    """
    left = []
    for change in grid(asked, plan, gpu):
        if gpu.holds(change.least):
            left.append(change)
    if not _any_fits(left, gpu):
        return None

    # Plan two changes at once, in the order of their cost.
    while left:
        tried = left[:2]
        left = left[2:]
        for change, again in zip(tried, planned([one.asked for one in tried]), strict=True):
            if isinstance(again, NotPlanned) or not gpu.holds(again.memory.total):
                continue
            return Fitting(
                words=list(change.words),
                command=shlex.join(["oneloop", "plan", *change.asked.words(), "--gpu", name]),
                total=again.memory.total,
                seconds=change.seconds,
            )
    return None


def _any_fits(changes: Sequence[Change], gpu: Gpu) -> bool:
    """Plan the combinations that save most; return whether one of them fits, or fails."""
    # FSDP2 and the fused loss can also cost memory: keep the largest combination with and without.
    largest: dict[tuple[str, bool], Asked] = {}
    for change in sorted(changes, key=lambda change: (-change.least, change.seconds)):
        fused = "--task.fused_loss" in change.words
        largest[change.asked.config_file, fused] = change.asked

    # A combination that cannot be planned proves nothing about the others.
    for one in planned([*largest.values()]):
        if isinstance(one, NotPlanned) or gpu.holds(one.memory.total):
            return True
    return False
