"""Check metrics and generation in eval mode, on a few samples before a run."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from oneloop.basics.generation import generated
from oneloop.checks.dry_run import DryRun
from oneloop.checks.rows import parts_of
from oneloop.task_protocol.generated import for_metrics
from oneloop.task_protocol.user_code import theirs
from oneloop.task_protocol.whole_batch import columns_of


def check_metrics(dry: DryRun) -> None:
    """Check metrics and generation on samples of the first evaluation set.

    Find values that are neither logged nor drawn. Under FSDP2 collective.

    Args:
        dry: the dry run, in eval mode.
    """
    contract = dry.contract
    check = contract.check_metrics
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
            dry.found.notes += check("metrics", "update", dry.run.device, given, outputs)
        if not dry.job.recipe.eval.generate:
            continue

        # Generate, and check the metrics of what is generated.
        made = theirs(task, "generate", partial(generated, task, dry.root, batch))
        texts = for_metrics(task, batch, made)
        dry.found.notes += check("generated_metrics", "update_generated", dry.run.device, *texts)
