"""Check task and model in eval mode, on a few samples before a run."""

from contextlib import nullcontext
from typing import Any

from torch import nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import missing, tool
from oneloop.basics.snapshot import Snapshot
from oneloop.basics.tensors import reshard
from oneloop.checks.tolerance import near, tolerance_of
from oneloop.evaluation import evaluating
from oneloop.job.build import Job
from oneloop.job.embeddings import check_embeddings
from oneloop.job.restore import contents_of, has_drawn, random_states
from oneloop.job.trial_passes import Wrapped
from oneloop.job.trial_samples import EVALUATED, Samples, load_samples, make_batch
from oneloop.launch.processes import Run
from oneloop.task_protocol.generated import check_generated
from oneloop.task_protocol.protocol_checks import Contract
from oneloop.task_protocol.whole_batch import columns_of, parts_of


def check_evaluation(
    contract: Contract,
    job: Job,
    run: Run,
    model: nn.Module,
    samples: Samples,
    notes: list[str],
    attributes: Snapshot,
) -> Any:
    """Check in eval mode: one sample, the same sample twice, and evaluation samples.

    Add remarks to ``notes``. ``attributes``: before. Return the model graph for TensorBoard.
    """
    first = samples[0]
    tolerance = tolerance_of(job, run, model)

    if contract.whole:
        check_embeddings(contract, job, run, model, samples, tolerance)

    with evaluating(model):
        one, weight = make_batch(contract, run, [first])
        two, twice = make_batch(contract, run, [first, first])
        if (contract.additive or contract.whole) and not contract.draws:
            contract.check_doubling("weight", weight, twice, 1e-6)

        # Compute the loss of the sample, and of the sample twice.
        held = contents_of(model)
        before = random_states(run.device)
        inner = model.module if isinstance(model, Wrapped) else model
        drawing: Any = nullcontext()
        if run.main and "tensorboard" in job.recipe.track:
            graph = tool("graph")
            if graph is None:
                notes.append(f"TensorBoard gets no graph of the model: {missing('graph')}")
            else:
                drawing = graph.Drawing(inner, one)
        with drawing as drawn:
            once = float(contract.loss(model, one)[0])
        reshard(model)  # FSDP2 drops what a forward has changed
        both = float(contract.loss(model, two)[0])
        contract.draws = contract.draws or has_drawn(before, run.device)

        # The second must be twice the first, unless evaluations change something.
        state = ""
        for name, found in contents_of(model).items():
            if found != held.get(name) and not state:
                state = f"a forward in evaluation changes the {name}"
        exact = contract.additive and not contract.draws and not state
        if exact and not contract.is_double(once, both, tolerance):
            reshard(model)
            again = float(contract.loss(model, one)[0])
            if near(once, again, tolerance):
                contract.check_doubling("loss", once, both, tolerance)
            names = [name for name in attributes.changed() if not name.endswith(".training")]
            known = ", ".join(names[:3]) or "none that can be compared"
            state = (
                "the same sample has another loss in the next evaluation, because the model or the "
                f"loss keeps a generator or other state (attributes that have changed: {known})"
            )
        if state and job.exact:
            raise BadInput(
                "batch.grain requires that evaluations are the same on every process and change "
                f"nothing, but {state}; change it outside of the forward, or remove batch.grain"
            )
        if state:
            notes.append(f"{state}, so another parallel layout trains or evaluates another model")

        # Check the metrics on the first evaluation set.
        for name in [*job.eval_sets][:1]:
            evaluated, _ = load_samples(first.reader, f"{EVALUATED}[{name!r}]", 0)
            notes += _check_metrics(contract, job, run, model, evaluated)
            if job.recipe.eval.generate:
                batch, _ = make_batch(Contract(job.task), run, evaluated)
                notes += check_generated(contract, inner, batch, run.device)
    return drawn.graph if drawn is not None else None


def _check_metrics(
    contract: Contract, job: Job, run: Run, model: nn.Module, samples: Samples
) -> list[str]:
    """Check metrics on a few samples of an evaluation set, whose batches may have other keys.

    Return lines about values that are neither logged nor drawn.
    """
    evaluation = Contract(job.task)
    batch, _ = make_batch(evaluation, run, samples)
    outputs = evaluation.loss(model, batch)[1]

    # With a loss over the whole batch, metrics get nothing but columns and parts.
    if contract.whole:
        columns = columns_of(job.task, batch)
        outputs = parts_of(contract, model, batch, len(samples))
        batch = columns
    return evaluation.check_metrics(batch, outputs, run.device)
