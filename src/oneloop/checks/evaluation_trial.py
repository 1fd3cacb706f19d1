"""Check data sets, task and model in eval mode, on a few samples before a run."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.generation import TIES, generated
from oneloop.basics.houses import missing, tool
from oneloop.basics.tensors import reshard
from oneloop.checks.dry_run import DryRun
from oneloop.checks.rows import parts_of
from oneloop.checks.state import changes, state_hashes
from oneloop.checks.tolerance import near
from oneloop.machine.compile import CUDA_GRAPHS
from oneloop.task_protocol.evaluation_metrics import adapted
from oneloop.task_protocol.generated import made_for_metrics
from oneloop.task_protocol.metric_collection import on_device
from oneloop.task_protocol.user_code import theirs
from oneloop.task_protocol.whole_batch import columns_of


def check_sets(dry: DryRun) -> None:
    """Check that the samples of evaluation sets are the same each time.

    Raises:
        BadInput: they are not, and the run has ``batch.grain``.
    """
    notes = dry.found.notes
    for name in dry.job.eval_sets:
        _, wrong = dry.read(name)
        if wrong:
            notes.append(f"{wrong}, so another evaluation has other results")
    if notes and dry.job.exact:
        raise BadInput(
            f"batch.grain requires that a sample is the same each time, but {notes[0]}; return "
            "copies, and use torch's global generator"
        )


def check_lengths(dry: DryRun) -> None:
    """Find out whether samples have several lengths: CUDA graphs are for one shape."""
    machine = dry.job.recipe.machine
    if machine.compile == "none" or machine.compile_mode not in CUDA_GRAPHS:
        return
    lengths = getattr(dry.job.order, "lengths", None)
    if lengths is None:
        # Compare the first samples.
        lengths = []
        for number in range(dry.number):
            tensors = filter(torch.is_tensor, tree_leaves(dry.batch([number])))
            lengths.append([tensor.shape for tensor in tensors])
    if any(length != lengths[0] for length in lengths):
        dry.found.notes.append(
            f"machine.compile_mode {machine.compile_mode} records CUDA graphs again for each "
            "length of a batch, and samples have several; max-autotune-no-cudagraphs records none"
        )


def check_doubling(dry: DryRun) -> None:
    """Check that weight and loss of a sample twice are twice its own, and that no state changes.

    Args:
        dry: the dry run, in eval mode.
    """
    contract = dry.contract
    model = dry.model
    found = dry.found
    one = dry.batch([0])
    weight = dry.weight
    two = dry.batch([0, 0])
    twice = dry.weight
    if found.additive and not found.collate_draws and not near(2 * weight, twice, 1e-6):
        raise contract.not_double("weight", weight, twice, 1e-6)

    # Compute the loss of the sample, and of the sample twice.
    hashes = state_hashes(model)
    with _drawing(dry, one) as drawing:
        once = float(contract.loss(model, one)[0])
    found.graph = getattr(drawing, "graph", None)
    reshard(model)  # FSDP2 drops what a forward has changed
    both = float(contract.loss(model, two)[0])
    found.draws = found.draws or dry.drew()

    # The second must be twice the first, unless evaluations change something. The comparison with
    # single samples finds small differences, and prints more digits.
    tolerance = max(1e-4, dry.rounding.tolerance)
    state = ""
    moved = changes(hashes, state_hashes(model))
    if moved:
        state = f"a forward in evaluation changes the {moved[0].rpartition(' has ')[0]}"
    elif contract.additive and not found.draws and not near(2 * once, both, tolerance):
        again = float(contract.loss(model, one)[0])
        if near(once, again, tolerance):
            raise contract.not_double("loss", once, both, tolerance)
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
        found.notes.append(f"{state}, so another parallel layout trains or evaluates another model")


def _drawing(dry: DryRun, batch: Mapping[str, Any]) -> Any:
    """Return a context for a forward, which draws the model graph for TensorBoard, if asked."""
    if not (dry.run.main and "tensorboard" in dry.job.recipe.track):
        return nullcontext()
    graph = tool("graph")
    if graph is None:
        dry.found.notes.append(f"TensorBoard gets no graph of the model: {missing('graph')}")
        return nullcontext()
    return graph.Drawing(dry.root, batch)


def check_metrics(dry: DryRun) -> None:
    """Check metrics and generation on samples of the first evaluation set, in eval mode.

    Find values that are neither logged nor drawn. Under FSDP2 collective.
    """
    contract = dry.contract
    task: Any = contract.task
    device = dry.run.device
    notes = dry.found.notes
    for name in [*dry.job.eval_sets][:1]:
        number, _ = dry.read(name)
        batch = dry.batch(range(number), name=name)
        given: Any = batch
        outputs: Any = contract.loss(dry.model, batch)[1]

        # With a loss over the whole batch, metrics get nothing but columns and parts.
        if contract.whole:
            given = columns_of(task, batch)
            outputs = parts_of(contract, dry.model, batch, number)
        if hasattr(task, "metrics"):
            metrics = theirs(task, "metrics", lambda: on_device(task.metrics(), device))
            notes += contract.check_metrics("metrics", metrics, "update", given, outputs)
        if not dry.job.recipe.eval.generate:
            continue

        # Generate, and update the metrics of what is generated.
        made = theirs(task, "generate", partial(generated, task, dry.root, batch))
        texts = made_for_metrics(task, made, samples=len(batch["index"]))
        metrics = theirs(task, "generated_metrics", task.generated_metrics)
        if TIES in adapted(metrics, "generated_metrics").higher_is_better:
            raise contract.wrong(
                "generated_metrics",
                f"has a metric {TIES!r}",
                "rename it: this is the number of texts that rounding could change",
            )
        metrics = on_device(metrics, device)
        notes += contract.check_metrics(
            "generated_metrics", metrics, "update_generated", batch, texts
        )
