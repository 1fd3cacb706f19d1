"""Changes that save memory and keep the result: which are possible, and the first one that fits."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from oneloop.tools.plan.asked import Asked
from oneloop.tools.plan.description import Plan
from oneloop.tools.plan.gpus import Gpu
from oneloop.tools.plan.planned import planned

Change = dict[str, str]  # keys and their values; config_file: the layout


def possible_changes(plan: Plan) -> list[Change]:
    """Return the changes that do not change the result, those that usually cost least first."""
    changes: list[Change] = []
    memory = plan.memory
    if memory.evaluation is not None and memory.evaluation.peak > memory.step.peak:
        changes.append({"eval.micro": "1"})
    if "EMA" in memory.kept:
        changes.append({"ema.device": "cpu"})
    if plan.fused_loss == "auto":
        changes.append({"task.fused_loss": "true"})

    # A smaller micro-batch, unless it changes the result.
    micro = plan.micro
    while micro % 2 == 0 and not (plan.exact or plan.batch_statistics):
        micro //= 2
        changes.append({"batch.micro": str(micro)})

    # Activation checkpointing computes some operations again, or all of them.
    recompute: list[Change] = []
    if plan.blocks and plan.recompute == "none":
        recompute = [{"machine.recompute": mode} for mode in ("selective", "full")]
    changes += recompute[:1]

    # A reduce-scatter after each micro-batch, so that no rank keeps whole gradients.
    if plan.sharded and plan.accumulate > 1 and not (plan.sync_each_batch or plan.exact):
        changes.append({"machine.sync_each_batch": "true"})
    # Each rank keeps its share of the state.
    if not plan.sharded and plan.processes > 1:
        changes.append({"config_file": "fsdp2"})
    return changes + recompute[1:]


def fitting_change(asked: Asked, plan: Plan, gpu: Gpu, name: str) -> dict[str, Any] | None:
    """Plan each change, then the first two together, the first three, and so on.

    Args:
        asked: What was planned.
        plan: Its plan, which does not fit.
        gpu: The device.
        name: The device as the value of ``--gpu``, for the command.

    Returns:
        The first one that fits, as ``--json`` prints it; None: none fits.
    """
    combined: Change = {}
    singles = possible_changes(plan)
    combinations: list[Change] = []
    for changes in (singles, combinations):
        for change, changed, again in _plans(asked, changes):
            # What cannot be planned alone is in no combination.
            if isinstance(again, str):
                continue
            if gpu.holds(again.memory.total):
                return {
                    "words": _words(change),
                    "command": shlex.join(["oneloop", "plan", *changed.words(), "--gpu", name]),
                    "total": again.memory.total,
                }
            if changes is singles:
                if combined:
                    combinations.append(combined | change)
                combined = combined | change
    return None


def _plans(asked: Asked, changes: Sequence[Change]) -> Iterator[tuple[Change, Asked, Plan | str]]:
    """Plan two changes at once; yield each with what was asked, and its plan."""
    for at in range(0, len(changes), 2):
        pair = changes[at : at + 2]
        changed = []
        for change in pair:
            training = (*asked.training, *_words({**change, "config_file": ""}))
            layout = change.get("config_file", asked.config_file)
            changed.append(replace(asked, training=training, config_file=layout))
        yield from zip(pair, changed, planned(changed), strict=True)


def _words(change: Change) -> list[str]:
    """Return a change as words of the command."""
    words = []
    for key, value in change.items():
        if value:
            words += [f"--{key}", value]
    return words
