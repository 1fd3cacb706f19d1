"""Prepare a run: look at its folder, then build and check its job, before anything is written."""

from dataclasses import replace

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.houses import required
from oneloop.job.build import Job, build_job
from oneloop.launch.processes import Run
from oneloop.machine.torch_settings import float32_products
from oneloop.recipe.schema import Recipe
from oneloop.run.compatibility import inputs_of, recipe_inputs
from oneloop.run.folder import Folder


def prepared(recipe: Recipe, run: Run, folder: Folder, *, cli: bool) -> Job | None:
    """Build and check the job of a recipe. Collective: call on every rank.

    Args:
        recipe: what to train.
        run: this process.
        folder: the run folder, which may hold an earlier run; nothing is written to it.
        cli: whether the command line runs it.

    Returns:
        The job, or None if the run in the folder is finished.

    Raises:
        BadInput: on every rank.
    """
    # Look at the folder on rank 0: may this run be there?
    finished: str | None = None
    with run.setting_up():
        if run.main:
            finished = folder.inspect(
                recipe_inputs(recipe),
                resume=recipe.run.resume,
                accept_changes=recipe.run.accept_changes,
            )
            # From Python, the result would be that of another class.
            if finished and folder.edited and not cli:
                raise BadInput(finished)
    finished = run.from_main(finished)
    if finished:
        run.display.say(finished)
        return None

    # Build the job, after a search for the micro-batch size.
    machine = recipe.machine
    replaced = float32_products(machine.matmul, benchmark=machine.cudnn_benchmark)
    if replaced:
        run.display.say(replaced)
    micro = None
    if isinstance(recipe.batch.micro, str):
        with run.setting_up():
            micro = required("batch.micro auto").find_micro(recipe, run)
    with run.setting_up():
        job = build_job(
            recipe, ranks=run.ranks, sharded=run.sharded, device=run.device.type, micro=micro
        )
        job = replace(job, inputs=inputs_of(job, run))
    if run.ranks > 1:
        from oneloop.run.same_on_ranks import reject_other_jobs

        reject_other_jobs(job, run)
    run.stopping.also(file=folder.path / "STOP", after=recipe.stop.seconds)
    return job
