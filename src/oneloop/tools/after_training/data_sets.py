"""The data sets that a command after training reads, and for which samples it generates."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from oneloop.task_protocol.generated import Generation, check_generates
from oneloop.task_protocol.protocol import check_sets
from oneloop.task_protocol.user_code import theirs


def sets_of(task: Any, data: str | None, *, labelled: bool) -> dict[str, Any]:
    """Return the data sets by name: those of the run, or other data.

    Args:
        task: of the run.
        data: rows to use instead (None: those of the run).
        labelled: whether they need labels; without labels, there is only one set.

    Raises:
        ValueError: the task has no evaluation set, or cannot read the data.
    """
    sets: dict[str, Any]
    if data is None:
        sets = task.eval_sets()
        if not labelled:
            sets = {name: sets[name] for name in list(sets)[:1]}
        if not sets:
            raise ValueError("the run's task has no validation set; give data with --data")
    elif not hasattr(task, "samples_of"):
        raise ValueError(
            f"--data {data}: {type(task).__name__} has no samples_of() to open it; remove --data"
        )
    else:
        opened = partial(task.samples_of, data, labelled=labelled)
        try:
            sets = {"data": theirs(task, "samples_of", opened)}
        except ValueError as error:
            raise ValueError(f"--data {data}: {str(error).removeprefix('task.data: ')}") from error
    check_sets(next(iter(sets.values())), sets)
    return sets


def generation_of(
    task: Any, sets: Mapping[str, Any], wanted: Any, micro: int | None
) -> Generation | None:
    """Return for which samples the task generates; None: for none.

    Args:
        task: of the run.
        sets: the sets that are evaluated, by name.
        wanted: number of samples, or all.
        micro: samples that are generated together (None: the default).

    Raises:
        ValueError: the task cannot generate for metrics.
    """
    if wanted:
        check_generates(task, sets)
    return Generation.of(wanted, micro)
