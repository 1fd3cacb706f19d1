"""Check task and model in eval mode, on a few samples before a run."""

from functools import partial
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.generation import TIES, generated
from oneloop.basics.seeds import has_drawn, random_states
from oneloop.basics.tensors import reshard
from oneloop.checks.dry_run import DryRun, differing
from oneloop.checks.rows import parts_of
from oneloop.checks.samples import EVALUATED
from oneloop.checks.state import state_hashes
from oneloop.checks.tolerance import near, tolerance_of
from oneloop.data.step_batches import Batch
from oneloop.task_protocol.evaluation_metrics import adapted
from oneloop.task_protocol.generated import made_for_metrics
from oneloop.task_protocol.metric_collection import on_device
from oneloop.task_protocol.user_code import theirs
from oneloop.task_protocol.whole_batch import columns_of


def check_doubling(dry: DryRun, one: Batch, weight: float, drawing: Any) -> list[str]:
    """Check that weight and loss of a sample twice are twice its own, and that no state changes.

    Args:
        dry: the dry run, in eval mode.
        one: the batch of a sample.
        weight: of this batch.
        drawing: a context for the first forward.

    Returns:
        Remarks on state that an evaluation changes.
    """
    contract = dry.contract
    model = dry.model
    two, twice = dry.batch([0, 0])
    if (contract.additive or contract.whole) and not contract.draws:
        contract.check_doubling("weight", weight, twice, 1e-6)

    # Compute the loss of the sample, and of the sample twice.
    hashes = state_hashes(model)
    before = random_states(dry.run.device)
    with drawing:
        once = float(contract.loss(model, one)[0])
    reshard(model)  # FSDP2 drops what a forward has changed
    both = float(contract.loss(model, two)[0])
    contract.draws = contract.draws or has_drawn(before, dry.run.device)

    # The second must be twice the first, unless evaluations change something. The comparison with
    # single samples finds small differences, and prints more digits.
    tolerance = max(1e-4, tolerance_of(dry.job, dry.run, model))
    state = ""
    moved = differing(hashes, state_hashes(model))
    if moved:
        state = f"a forward in evaluation changes the {moved[0]}"
    exact = contract.additive and not contract.draws and not state
    if exact and not near(2 * once, both, tolerance):
        again = float(contract.loss(model, one)[0])
        if near(once, again, tolerance):
            contract.check_doubling("loss", once, both, tolerance)
        names = [name for name in dry.values.changed() if not name.endswith(".training")]
        known = ", ".join(names[:3]) or "none that can be compared"
        state = (
            "the same sample has another loss in the next evaluation, because the model or the "
            f"loss keeps a generator or other state (attributes that have changed: {known})"
        )
    if state and dry.job.exact:
        raise BadInput(
            "batch.grain requires that evaluations are the same on every process and change "
            f"nothing, but {state}; change it outside of the forward, or remove batch.grain"
        )
    if state:
        return [f"{state}, so another parallel layout trains or evaluates another model"]
    return []


def check_metrics(dry: DryRun) -> list[str]:
    """Check metrics and generation on samples of the first evaluation set, in eval mode.

    Return lines about values that are neither logged nor drawn.
    """
    notes: list[str] = []
    contract = dry.contract
    for name in [*dry.job.eval_sets][:1]:
        # Its batches may have other keys than those of training.
        member = f"{EVALUATED}[{name!r}]"
        number, _ = dry.read(member)
        batch, _ = dry.batch(range(number), member=member)
        given: Any = batch
        outputs: Any = contract.loss(dry.model, batch)[1]

        # With a loss over the whole batch, metrics get nothing but columns and parts.
        if contract.whole:
            given = columns_of(dry.job.task, batch)
            outputs = parts_of(contract, dry.model, batch)
        notes += contract.check_metrics(given, outputs, dry.run.device)
        if dry.job.recipe.eval.generate:
            notes += _check_generated(dry, batch)
    return notes


def _check_generated(dry: DryRun, batch: Batch) -> list[str]:
    """Generate for a batch, and update the metrics. Under FSDP2 collective.

    Args:
        dry: the dry run.
        batch: on the device.

    Returns:
        Lines about values of the metrics that are neither logged nor drawn.
    """
    contract = dry.contract
    task: Any = contract.task
    made = theirs(task, "generate", partial(generated, task, dry.root, batch))
    own = theirs(task, "generated_metrics", task.generated_metrics)
    try:
        given = made_for_metrics(task, made, samples=len(batch["index"]))
        known = adapted(own, "generated_metrics")
    except ValueError as error:
        raise BadInput(str(error)) from None
    if TIES in known.higher_is_better:
        raise contract.wrong(
            "generated_metrics",
            f"has a metric {TIES!r}",
            "rename it: this is the number of texts that rounding could change",
        )
    metrics = on_device(own, dry.run.device)
    theirs(task, "update_generated", partial(task.update_generated, metrics, batch, given))
    return contract.check_computed("generated_metrics", metrics)
