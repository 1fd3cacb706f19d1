"""What is checked in each step of a run: does its result depend on the parallel layout?"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.processes import Run
from oneloop.loop.repeat import Repeats
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.contents import Contents
from oneloop.machine.layout_checks import DEPENDS, Checks, search_unused


class StepChecks(NamedTuple):
    """The checks of a step; None: off."""

    layout: Checks  # around each micro-batch
    contents: Contents | None  # around all micro-batches of a step, and around an evaluation
    repeats: Repeats | None  # before some steps


def step_checks(
    job: Job,
    run: Run,
    model: nn.Module,
    seen: Preflight,
    seed: Callable[[int, int], None],
    *,
    checked: bool,
) -> StepChecks:
    """Return the checks of each step.

    Args:
        job: what the recipe describes.
        run: this process.
        model: the prepared model.
        seen: what the preflight check found out.
        seed: seeds the random numbers of a rank's micro-batch of the current step.
        checked: whether to compare contents and to repeat micro-batches, unless
            ``machine.check_every`` is 0.

    Raises:
        BadInput: unused parameters must be searched for, and this torch cannot.
    """
    layout = _layout_checks(job, run, model, seen)

    if not checked or "check" not in job.intervals:
        return StepChecks(layout, None, None)
    contents = _contents(job, run, model, seen)

    # A model that is known to be stateful would only be reported once more.
    if not job.exact and (seen.moved or seen.stateful):
        return StepChecks(layout, contents, None)
    return StepChecks(layout, contents, Repeats(job, run, model, layout, seed))


def _layout_checks(job: Job, run: Run, model: nn.Module, seen: Preflight) -> Checks:
    """Return the checks around each micro-batch: is a step the same on every parallel layout?"""
    asked = job.recipe.machine.find_unused_parameters
    able = search_unused(model)
    if asked and not able:
        raise BadInput(
            "machine.find_unused_parameters true requires torch 2.15 or newer under FSDP2"
        )

    # Report a changed tensor once, unless the start-up log has reported that already.
    def report(name: str) -> None:
        run.display.say(f"a forward in training changes the {name}; {DEPENDS}")

    known = _moves(model, seen)

    # Under FSDP2 the ranks agree in each step on the parameters that none of them used.
    searched = run.sharded and able and (asked or seen.unused)

    return Checks(
        model,
        parameters=run.ranks > 1 or job.exact,
        buffers=job.exact,
        report=None if known else report,
        union=run.union if searched else None,
    )


def _contents(job: Job, run: Run, model: nn.Module, seen: Preflight) -> Contents | None:
    """Return the comparison of contents around each step; None: nothing is compared."""

    def report(change: str) -> None:
        run.display.say(f"{change}; {DEPENDS}")

    # What must not change, and what is only reported?
    if job.exact:
        rejected = ["parameter", "buffer"]
    elif run.ranks > 1:
        rejected = ["parameter"]
    else:
        rejected = []
    compared = rejected if _moves(model, seen) else ["parameter", "buffer"]
    if not compared:
        return None
    return Contents(model, device=run.device, compared=compared, rejected=rejected, report=report)


def _moves(model: nn.Module, seen: Preflight) -> bool:
    """Return whether a tensor is known to change in a forward."""
    return bool(seen.moved) or has_batch_statistics(model)
