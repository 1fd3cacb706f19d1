"""Check metrics and generation in eval mode, on a few samples before a run."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from oneloop.basics.generation import TIES, generated
from oneloop.checks.dry_run import DryRun
from oneloop.checks.rows import parts_of
from oneloop.task_protocol.contract import describe
from oneloop.task_protocol.evaluation_metrics import adapted, matrices, scalars
from oneloop.task_protocol.generated import made_for_metrics
from oneloop.task_protocol.metric_collection import Collection, not_logged, on_device
from oneloop.task_protocol.user_code import theirs
from oneloop.task_protocol.whole_batch import columns_of


def check_metrics(dry: DryRun) -> None:
    """Check metrics and generation on samples of the first evaluation set.

    Find values that are neither logged nor drawn. Under FSDP2 collective.

    Args:
        dry: the dry run, in eval mode.
    """
    contract = dry.contract
    task = contract.task
    for name in [*dry.job.eval_sets][:1]:
        number, _ = dry.read(name)
        batch = dry.batch(range(number), name=name)
        given: Mapping[str, Any] = batch
        outputs: Mapping[str, Any] = contract.loss(dry.model, batch)[1]

        # With a loss over the whole batch, metrics get nothing but columns and parts.
        if contract.whole:
            given = columns_of(task, batch)
            outputs = parts_of(dry, batch)
        if hasattr(task, "metrics"):
            _check(dry, "metrics", "update", given, outputs)
        if not dry.job.recipe.eval.generate:
            continue

        # Generate, and check the metrics of what is generated.
        made = theirs(task, "generate", partial(generated, task, dry.root, batch))
        texts = made_for_metrics(task, made, samples=number)
        known = adapted(contract.call("generated_metrics"), "generated_metrics")
        if TIES in known.higher_is_better:
            raise contract.wrong(
                "generated_metrics",
                f"has a metric {TIES!r}",
                "rename it: this is the number of texts that rounding could change",
            )
        _check(dry, "generated_metrics", "update_generated", batch, texts)


def _check(dry: DryRun, made_by: str, updated_by: str, *given: Any) -> None:
    """Make metrics, update them, and check what they compute.

    Args:
        dry: the dry run.
        made_by: the task's method that makes the metrics.
        updated_by: the one that updates them.
        given: its arguments after the metrics.
    """
    contract = dry.contract
    task = contract.task
    make = getattr(task, made_by)
    metrics = theirs(task, made_by, lambda: on_device(make(), dry.run.device))
    contract.call(updated_by, metrics, *given)
    try:
        computed = metrics.compute()
    except Exception:
        return  # a few samples may not suffice
    if not isinstance(computed, Mapping):
        raise contract.wrong(
            made_by,
            f"computes {describe(computed)}",
            "let compute return a dict of named metrics",
        )
    known = adapted(metrics, made_by)
    values = known.compute()
    scalars(values, made_by)  # raises ValueError if a value is not a number
    matrices(task, values)  # raises ValueError if names are missing
    if isinstance(known, Collection):
        dry.found.notes += known.left_out()
    dry.found.notes += not_logged(values)
