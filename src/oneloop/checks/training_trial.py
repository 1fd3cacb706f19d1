"""Check task and model in training mode, on a few samples before a run."""

from collections.abc import Sequence

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.basics.seeds import other_states
from oneloop.basics.tensors import restored_buffers
from oneloop.checks.dry_run import DryRun
from oneloop.checks.passes import Pass, changed
from oneloop.checks.samples import BY_COLLATE, TRAINED
from oneloop.checks.state import state_hashes
from oneloop.checks.tolerance import near
from oneloop.data.sample_checksums import IN_PLACE
from oneloop.job.preflight_result import metric_names
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.fsdp2_units import other_units
from oneloop.measure.flops import Operations
from oneloop.measure.meter import OWN_METRICS

OWN_STATE = "the model, the loss or collate keeps its own generator or counter"
_SEEDS = 4  # with which FSDP2 must run the same units


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
        operations = Operations(modules=dry.run.sharded)
        with restored_buffers(model):
            passes.append(dry.train(batch, operations=operations))
            after = state_hashes(model)
        units.append(dry.units.calls)
        for name in {**before, **after}:
            if before.get(name) != after.get(name) and name not in moved:
                moved.append(name)
        dry.draws = dry.draws or dry.drew()
        if dry.seeded[1] != other_states():
            found.others.drawn = True
    found.draws = found.draws or dry.draws
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
    several = len(set(units[0])) > 1 and not has_batch_statistics(dry.model)
    if several and dry.draws and not error:
        drawn = [_units(dry, dry.micro_batch, seed) for seed in range(_SEEDS)]
        error = other_units(drawn, by="random numbers (LayerDrop)")
    if several and not error:
        error = other_units([_units(dry, [at]) for at in range(dry.number)])
    if error:
        raise BadInput(error)


def _units(dry: DryRun, numbers: Sequence[int], seed: int = 0) -> list[str]:
    """Return the units that run for these samples."""
    batch = dry.batch(numbers, seed=seed)
    with restored_buffers(dry.model):
        dry.train(batch, backward=False)
    return dry.units.calls


def check_losses(dry: DryRun, first: Pass, last: Pass) -> None:
    """Find out why the same samples and seeds do not give the same loss.

    Args:
        dry: the dry run.
        first: result of a micro-batch.
        last: result of the micro-batch that was loaded again.

    Raises:
        BadInput: the run must be the same each time.
    """
    losses = first.loss, last.loss
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
    if stateful and dry.job.exact:
        raise BadInput(
            "batch.grain requires that the same samples with the same seeds give the same loss, "
            f"but {stateful}. Use torch's global generator and return copies, or remove batch.grain"
        )
    if stateful and dry.contract.whole:
        raise BadInput(
            "a loss over the whole batch embeds each micro-batch twice, and needs equal results, "
            f"but {stateful}. Use torch's global generator and return copies"
        )
    recompute = dry.job.recipe.machine.recompute
    if stateful.endswith(OWN_STATE) and recompute != "none":
        raise BadInput(
            f"machine.recompute {recompute} computes blocks a second time, but {stateful}. Use "
            "torch's global generator, or machine.recompute none"
        )


def check_gradients(dry: DryRun, last: Pass) -> None:
    """Find the trained parameters that get no gradient. Raise BadInput if DDP would wait."""
    unused = dry.found.unused
    for name, parameter in dry.root.named_parameters():
        if parameter.requires_grad and bare_name(name) not in last.gradients:
            unused.append(bare_name(name))

    # FSDP2 needs no gradient of each parameter, and machine.find_unused_parameters has DDP search.
    search = dry.job.recipe.machine.find_unused_parameters
    if unused and dry.run.ranks > 1 and not dry.run.sharded and not search:
        names = ", ".join(unused[:3])
        if len(unused) > 3:
            names += f" and {len(unused) - 3} more"
        raise BadInput(
            f"the loss does not use {names}, so DDP would wait for their gradients; freeze them "
            "(requires_grad_(False) in model()), or, if other steps, samples or random numbers use "
            "them, set --machine.find_unused_parameters true"
        )


def check_outputs(dry: DryRun, last: Pass) -> None:
    """Find the metrics among the outputs of a loss."""
    dry.found.metrics = metric_names(last.outputs)
    for name in dry.found.metrics:
        if f"train/{name}" in OWN_METRICS:
            raise dry.contract.wrong(
                "loss",
                f"returned the output {name!r}",
                f"oneloop also logs train/{name}: rename it",
            )
