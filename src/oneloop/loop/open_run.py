"""Open the folder of a run: lock it, restore the state from a checkpoint, and begin the log."""

from functools import partial

from oneloop.basics.bucket import is_address
from oneloop.job.build import Job
from oneloop.job.preflight_result import Preflight
from oneloop.launch.processes import Run
from oneloop.loop.begin_folder import begin_folder
from oneloop.loop.counters import RunLog
from oneloop.loop.start_lines import start_lines
from oneloop.loop.training_state import State
from oneloop.run.before_run import before_run
from oneloop.run.folder import Folder
from oneloop.show.tracking import Tracking
from oneloop.supervise.pipe import CHANNEL

_SMALL = 1 << 19  # approximate bytes of a checkpoint without tensors: manifests, metrics, a page


def open_run(job: Job, run: Run, folder: Folder, state: State, seen: Preflight) -> RunLog:
    """Print the start-up log, lock the folder, resume, and write recipe and environment.

    Collective: call on every rank.

    Args:
        job: what the recipe describes.
        run: this process.
        folder: the run folder; rank 0 locks and writes it.
        state: restored in place from a checkpoint, if there is one.
        seen: what the preflight check found out, for the start-up log; and the model's graph for
            TensorBoard.

    Returns:
        The log of the run.

    Raises:
        BadInput: the folder is in use or too full, or its checkpoints are damaged or do not fit;
            raised on all ranks.
    """
    recipe = job.recipe
    say = run.display.say
    run.display.lines(start_lines(job, run, state.model, state.optimizer, state.emas, seen))

    # Lock the folder and the mirror before reading them: another start might still write there.
    _lock(job, run, folder, state)

    # Let the task work with the weights before the first step. A dry run only tries it.
    if not recipe.debug.dry_run:
        before_run(job.task, state.model, run, sets=job.sets)

    # Resume.
    with run.setting_up():
        saved = state.resume(state.checkpoints, recipe.run.resume, say=say)
        job.reject_position(state.count.position)

    # Write the recipe and the environment. From here on, a stop saves a checkpoint.
    with run.setting_up():
        run.stopping.early = False
        run.begun = True
        # The supervisor also learns that from now on a stop is more than an end.
        CHANNEL.folder = folder.path.absolute()
        CHANNEL.send(folder=str(CHANNEL.folder))
        if run.main:
            begin_folder(job, run, folder, state)

    # Start the clock.
    state.count.begin()

    # Begin the log. Its state is saved, too: a resume deletes the lines of lost steps.
    tracking = Tracking(
        run.accelerator,
        folder.path,
        project=recipe.name,
        config=recipe.resolved,
        resumed=saved.get("tracking"),
        step=state.count.step,
        graph=seen.graph,
        say=say,
    )
    state.parts["tracking"] = tracking
    run.closing.callback(tracking.close)

    run_log = RunLog(
        state.count,
        state.results,
        tracking,
        run.display,
        unit=job.unit,
        resumed="tracking" in saved,
        before=partial(_reject_moved, folder, run),
    )
    if saved:
        run_log.event("resume")
    run.display.begin(lambda: state.count.step, total=job.steps)
    return run_log


def _reject_moved(folder: Folder, run: Run) -> None:
    """Raise OSError if the folder was moved; the supervisor must not write there, either."""
    moved = folder.moved() if run.main else ""
    if moved:
        CHANNEL.folder = None
        CHANNEL.send(folder=None)
        raise OSError(moved)


def _lock(job: Job, run: Run, folder: Folder, state: State) -> None:
    """Lock the folder, if its disk has room for the run, and begin to write to the mirror."""
    # Estimate the bytes still to write. Under FSDP2, the estimate is collective. In a temporary
    # folder of an address, checkpoints are not kept.
    recipe = job.recipe
    once, each = state.size(job.tried.share, getattr(job.task, "origin", None))
    temporary = is_address(recipe.run.dir)
    if temporary:
        each = 0
    else:
        each += _SMALL
    with run.setting_up():
        if run.main:
            there = len(state.checkpoints.store.sealed())
            folder.hold(need=max(0, job.checkpoints_kept - there) * each + once + _SMALL)

    # Do the ranks share the folder? If not, only the mirror keeps the checkpoints.
    address = recipe.mirror
    shared = not temporary
    if shared and run.ranks > 1:
        from oneloop.run.same_on_ranks import in_one_folder

        shared = in_one_folder(folder.path, run, recipe.machine.patience, required=address is None)
    if address is None:
        return
    from oneloop.run.mirrored_folder import MirroredFolder

    assert isinstance(folder, MirroredFolder)

    # Rank 0 has the lease of the mirror; the other ranks write under it.
    lease = None
    if folder.lease is not None:
        lease = (folder.lease.number, folder.lease.about)
    state.checkpoints.mirror(
        address,
        lease=run.from_main(lease),
        counts=not shared,
        limit=1e6 * recipe.save.upload_limit,  # bytes per second
    )
    if run.main:
        folder.uploads = state.checkpoints.saving
    if shared:
        run.display.say(f"mirror: {address} (copies of run.dir)")
    else:
        run.display.say(
            f"mirror: {address} (a checkpoint counts when it is there; hosts need no shared disk)"
        )
