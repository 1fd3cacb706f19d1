"""Check task and model in training mode, on a few samples before a run."""

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.parameter_names import bare_name
from oneloop.checks.contract import Contract
from oneloop.checks.dry_run import DryRun, TrialPass, differing
from oneloop.checks.passes import changed
from oneloop.checks.samples import BY_COLLATE, TRAINED
from oneloop.checks.state import state_hashes
from oneloop.checks.tolerance import near, tolerance_of
from oneloop.data.sample_checksums import IN_PLACE
from oneloop.job.preflight_result import metric_names
from oneloop.machine.blocks import has_batch_statistics
from oneloop.machine.fsdp2_units import other_units
from oneloop.measure.meter import OWN_METRICS

OWN_STATE = "the model, the loss or collate keeps its own generator or counter"
_SEEDS = 4  # with which FSDP2 must run the same units


def run_twice(dry: DryRun) -> tuple[TrialPass, TrialPass, list[str]]:
    """Run a micro-batch twice with the same seeds; also return what a forward changes, by name.

    Raises:
        BadInput: a forward changes what it must not change.
    """
    before = state_hashes(dry.model)
    trained = [(name, p) for name, p in dry.model.named_parameters() if p.requires_grad]
    passes = []
    moved: dict[str, None] = {}
    for load in (0, 1):
        batch, _ = dry.batch(dry.micro_batch, load=load)
        passes.append(dry.train(batch, closely=True))
        moved |= dict.fromkeys(differing(before, passes[-1].hashes))

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
            "batch.grain requires the same buffers on every process, but "
            f"{changed(next(iter(moved)))}"
        )
    return passes[0], passes[1], [*moved]


def check_units(dry: DryRun, first: TrialPass, last: TrialPass) -> None:
    """Check that all batches run the same FSDP2 units. Raise BadInput if they do not."""
    error = other_units([first.units, last.units], by="a state of the model")

    # Which units run may depend on random numbers (LayerDrop), or on the sample.
    several = len(set(first.units)) > 1 and not has_batch_statistics(dry.model)
    if several and first.draws and not error:
        drawn = [_units(dry, dry.micro_batch, seed) for seed in range(_SEEDS)]
        error = other_units(drawn, by="random numbers (LayerDrop)")
    if several and not error:
        error = other_units([_units(dry, range(at, at + 1)) for at in range(dry.number)])
    if error:
        raise BadInput(error)


def _units(dry: DryRun, numbers: range, seed: int = 0) -> list[str]:
    """Return the units that run for these samples."""
    return dry.train(dry.batch(numbers, seed=seed)[0], backward=False).units


def check_losses(dry: DryRun, first: TrialPass, last: TrialPass) -> str:
    """Return why the same samples and seeds do not give the same loss; empty if they do.

    Args:
        dry: the dry run.
        first: result of a micro-batch.
        last: result of the micro-batch that was loaded again.

    Raises:
        BadInput: the run must be the same each time.
    """
    losses = first.loss, last.loss
    stateful: str = dry.read(TRAINED)[1]
    if not stateful.endswith((IN_PLACE, BY_COLLATE)):
        cause = stateful or OWN_STATE
        if not stateful and dry.run.device.type != "cpu" and near(*losses, 1e-5):
            cause = "a kernel of the device is not deterministic (see machine.deterministic)"
        stateful = ""
        if not near(*losses, 1e-3 * tolerance_of(dry.job, dry.run, dry.model)):
            stateful = (
                f"the same samples and seeds give a different loss ({losses[0]:.9g} and "
                f"{losses[1]:.9g}): {cause}"
            )
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
    return stateful


def check_gradients(dry: DryRun, last: TrialPass) -> list[str]:
    """Return the trained parameters that get no gradient. Raise BadInput if DDP would wait."""
    unused = []
    for name, parameter in dry.model.named_parameters():
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
    return unused


def check_outputs(contract: Contract, last: TrialPass) -> tuple[str, ...]:
    """Return the names of the metrics among the outputs of a loss."""
    names = metric_names(last.outputs)
    for name in names:
        if f"train/{name}" in OWN_METRICS:
            raise contract.wrong(
                "loss",
                f"returned the output {name!r}",
                f"oneloop also logs train/{name}: rename it",
            )
    return names
