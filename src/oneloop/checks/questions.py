"""Questions about data sets, state and random numbers, on a few samples before a run."""

from collections.abc import Sequence

from oneloop.basics.differences import differences
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import missing, tool
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import other_states
from oneloop.basics.tensors import reshard, restored_buffers
from oneloop.checks.dry_run import DryRun
from oneloop.checks.passes import LOSS, Pass, changed, whole_parameters
from oneloop.checks.samples import BY_COLLATE, TRAINED
from oneloop.checks.state import state_hashes
from oneloop.checks.tolerance import near
from oneloop.data.fingerprint import IN_PLACE
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.fsdp2_units import other_units
from oneloop.measure.flops import Operations
from oneloop.task_protocol.contract import Contract

OWN_STATE = "the model, the loss or collate keeps its own generator or counter"
_SEEDS = 4  # with which FSDP2 must run the same units


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
        raise _not_double(contract, "weight", weight, twice, 1e-6)

    # Compute the loss of the sample, and of the sample twice.
    hashes = state_hashes(model)
    with whole_parameters(dry.root):
        once = float(contract.loss(model, one)[0])
    reshard(model)  # FSDP2 drops what a forward has changed
    both = float(contract.loss(model, two)[0])
    found.draws |= dry.drew()

    # Draw the model for TensorBoard.
    if dry.run.main and "tensorboard" in dry.job.recipe.track:
        graph = tool("graph")
        problem = missing("graph")
        if graph is not None:
            found.graph, problem = graph.draw(contract.loss, dry.root, one)
        if problem:
            found.notes.append(f"TensorBoard gets no graph of the model: {problem}")

    # The second must be twice the first, unless evaluations change something. The comparison with
    # single samples finds small differences, and prints more digits.
    tolerance = max(1e-4, dry.rounding.tolerance)
    state = ""
    moved = [*differences(hashes, state_hashes(model))]
    if moved:
        state = f"a forward in evaluation changes the {moved[0]}"
    elif contract.additive and not found.draws and not near(2 * once, both, tolerance):
        again = float(contract.loss(model, one)[0])
        if near(once, again, tolerance):
            raise _not_double(contract, "loss", once, both, tolerance)
        names = [name for name in dry.values.changed() if not name.endswith(".training")]
        known = ", ".join(names[:3]) or "none that can be compared"
        state = (
            "the same sample has another loss in the next evaluation: the model or the loss keeps "
            f"state (changed attributes: {known})"
        )
    if state and dry.job.exact:
        raise BadInput(
            "batch.grain requires evaluations that change nothing and repeat. "
            f"Found: {state}; change it outside of the forward, or remove batch.grain"
        )
    if state:
        found.notes.append(f"{state}, so another parallel layout trains or evaluates another model")


def run_twice(dry: DryRun) -> tuple[list[Pass], list[list[str]]]:
    """Run a micro-batch twice with the same seeds; also return which units of FSDP2 have run.

    Find out what a forward changes, whether it draws random numbers, and how much it computes.

    Raises:
        BadInput: a forward changes what it must not change.
    """
    model = dry.model
    found = dry.found
    moved = found.moved
    before = state_hashes(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    passes = []
    units = []
    for load in (0, 1):
        batch = dry.batch(dry.micro_batch, load=load)
        with restored_buffers(model):
            with Operations() as operations:
                passes.append(dry.train(batch, operations))
            after = state_hashes(model)
        units.append(dry.units.calls)
        moved += [name for name in differences(before, after) if name not in moved]
        dry.draws |= dry.drew()
        found.draws_others |= dry.seeded[1] != other_states()
    found.draws |= dry.draws
    found.flops = operations.total / len(dry.micro_batch)

    # Each process would change its own copy.
    for name, parameter in trained:
        if not parameter.requires_grad:
            raise BadInput(
                f"{bare_name(name)} was frozen during training; freeze it for the whole run, in "
                "model() or by optimizer.groups"
            )
    parameters = [name for name in moved if name.startswith("parameter")]
    if parameters and (dry.run.ranks > 1 or dry.job.exact):
        raise BadInput(changed(parameters[0]))
    if moved and dry.job.exact:
        raise BadInput(
            f"batch.grain requires the same buffers on every process, but {changed(moved[0])}"
        )
    return passes, units


def check_units(dry: DryRun, units: Sequence[Sequence[str]]) -> None:
    """Check that all batches run the same FSDP2 units. Raise BadInput if they do not.

    Args:
        dry: the dry run.
        units: what each pass over the micro-batch has run.
    """
    error = other_units(units, by="a state of the model")

    # Which units run may depend on random numbers (LayerDrop), or on the sample.
    if not error and len(set(units[0])) > 1 and not has_batch_statistics(dry.root):
        calls = []
        for seed in range(_SEEDS):
            batch = dry.batch([seed % len(dry.samples)], seed=seed)
            with restored_buffers(dry.model):
                dry.train(batch)
            calls.append(dry.units.calls)
        error = other_units(calls, by="random numbers (LayerDrop) or on the samples")
    if error:
        raise BadInput(error)


def check_losses(dry: DryRun, first: Pass, last: Pass) -> None:
    """Find out why the same samples and seeds do not give the same loss.

    Args:
        dry: the dry run.
        first: result of a micro-batch.
        last: result of the micro-batch that was loaded again.

    Raises:
        BadInput: the run must be the same each time.
    """
    losses = first[LOSS].product, last[LOSS].product
    cause: str = dry.read(TRAINED)[1]
    if cause.endswith((IN_PLACE, BY_COLLATE)):
        stateful = cause
    elif near(*losses, 1e-3 * dry.rounding.tolerance):
        stateful = ""
    else:
        if not cause:
            cause = OWN_STATE
            if dry.run.device.type != "cpu" and near(*losses, 1e-5):
                cause = "a kernel of the device is not deterministic (see machine.deterministic)"
        stateful = (
            f"the same samples and seeds give a different loss ({losses[0]:.9g} and "
            f"{losses[1]:.9g}): {cause}"
        )
    dry.found.stateful = stateful
    if not stateful:
        return
    recompute = dry.job.recipe.machine.recompute
    if dry.job.exact:
        need = "batch.grain requires that the same samples with the same seeds give the same loss"
    elif dry.contract.whole:
        need = "a loss over the whole batch embeds each micro-batch twice, and needs equal results"
    elif stateful.endswith(OWN_STATE) and recompute != "none":
        need = f"machine.recompute {recompute} computes blocks a second time"
    else:
        return
    raise BadInput(
        f"the same samples and seeds must give the same loss: {need}; found: {stateful}. Use "
        "torch's global generator and return copies, or train without it"
    )


def _not_double(
    contract: Contract, member: str, once: float, twice: float, tolerance: float
) -> BadInput:
    """Return the error for a batch with a sample twice that has not twice its value.

    Args:
        contract: of the task.
        member: ``weight`` or ``loss``.
        once: value for one sample.
        twice: value for a batch with this sample twice.
        tolerance: relative tolerance for rounding.
    """
    # Name the likely reason: twice the same value is a mean.
    if member == "weight":
        fix = "the weight of a batch is the sum of its samples'"
    elif near(once, twice, tolerance):
        fix = (
            "that is a mean: return the SUM over samples (reduction='sum'); the loop divides "
            "once, by the weight"
        )
    else:
        fix = (
            "another parallel layout would train a different model: return the sum of the "
            "samples' losses."
            " If that is impossible (contrastive losses, mixup), set additive = False in "
            "the class"
        )
    return contract.wrong(
        member,
        f"returned {once:.6g} for a sample and {twice:.6g} for the same sample twice",
        fix,
    )
