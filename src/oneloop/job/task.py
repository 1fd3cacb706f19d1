"""The task of a recipe: create it, and find out what a run needs to know about it."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import nn

from oneloop.basics.bucket import StoreError, ends_program
from oneloop.basics.exit_codes import Unavailable
from oneloop.machine.blocks import has_batch_statistics
from oneloop.recipe.class_paths import resolve
from oneloop.recipe.schema import EvalConfig, Recipe
from oneloop.task_protocol.evaluation_metrics import directions, prefix
from oneloop.task_protocol.generated import generating_weights
from oneloop.task_protocol.protocol import Progress, Task, check
from oneloop.task_protocol.user_code import where
from oneloop.task_protocol.whole_batch import is_whole_batch, loss_alone


def make_task(recipe: Recipe) -> Task:
    """Create the recipe's task. Raise ValueError if that fails, or if the object is not a task."""
    name = recipe.task.name
    kind = resolve("task", name)
    try:
        task: Task = kind(**recipe.task.options)
    except (ValueError, ImportError, MemoryError, Unavailable):
        raise  # these messages are for the user already
    except StoreError as error:
        raise ends_program(error) from error
    except Exception as error:
        raise ValueError(
            f"task.name {name}: __init__ failed: {type(error).__name__}: {error}{where(error)}"
        ) from error
    check(task)

    # Until a run is about to begin, samples are only tried.
    if hasattr(task, "before_run"):
        task.before_run(None, None)

    # A loss over the whole batch is also a loss of one batch alone.
    if is_whole_batch(task):
        task.loss = partial(loss_alone, task)  # type: ignore[method-assign]

    # Set its progress, until the run does.
    if hasattr(task, "progress"):
        try:
            task.progress = Progress(lambda: 0, 1, 1)
        except (AttributeError, TypeError) as error:
            raise ValueError(
                f"task.name {name}: its progress cannot be set ({error}); write progress = None in "
                "the class"
            ) from error
    return task


def reject_skips(task: Task, sets: Iterable[Any], model: nn.Module) -> None:
    """Raise ValueError if data sets leave out samples, and the others would then train differently.

    Args:
        task: of the run.
        sets: its data sets. Those that leave out samples have the attribute ``skips``.
        model: of the run.
    """
    if not any(getattr(part, "skips", False) for part in sets):
        return
    why = ""
    if is_whole_batch(task) or not getattr(task, "additive", True):
        why = "the loss of each sample depends on the others of its batch"
    elif has_batch_statistics(model):
        why = "the model has BatchNorm, which sees the whole micro-batch"
    if why:
        raise ValueError(
            f"bad rows cannot be left out while they are read: {why}; set task.unreadable stop, "
            "or copy the data to a disk"
        )


def larger_is_better(
    setting: EvalConfig, task: Task, eval_sets: Iterable[str], emas: Sequence[str]
) -> bool:
    """Return whether a larger ``eval.best`` is better.

    Raise ValueError if no evaluation computes this metric, or if its direction is unknown.
    """
    # Only one kind of weights generates.
    best = setting.metric
    known: dict[str, bool | None] = {}
    generating = generating_weights(emas) if setting.generate else ""
    names = [name for name in eval_sets if name != "test"]
    for weights in ("raw", *emas):
        head = "" if weights == "raw" else f"{weights}/"
        metrics = sorted(directions(task, generated=weights == generating).items())
        for name in names:
            known |= {f"{head}{prefix(name)}/{metric}": upward for metric, upward in metrics}
    if known and best not in known:
        raise ValueError(
            f"eval.best {best!r} is not a metric of this task; known: {', '.join(known)}"
        )
    larger = setting.larger_is_better
    if larger is None:
        larger = known.get(best, False)
    if larger is None:
        raise ValueError(
            f"eval.best {best}: this metric has no direction; write --eval.best max:{best} if "
            f"larger values are better, or --eval.best min:{best}"
        )
    return larger
