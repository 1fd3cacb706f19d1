"""The inputs of a run (data, model, recipe), which checkpoints store and a resume compares."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.optim import Optimizer
from xxhash import xxh3_64_hexdigest

from oneloop.basics.parameter_names import bare_name
from oneloop.basics.untrusted import damaged
from oneloop.data.fingerprint import differences, fingerprint_of
from oneloop.data.sample_checksums import SAMPLES, spread_checksum
from oneloop.data.sample_reader import read_once
from oneloop.frozen.outputs import placeholder_outputs
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.optim.parameter_groups import LR_FACTOR
from oneloop.run.environment import computed_by
from oneloop.run.source_code import source_of
from oneloop.task_protocol.user_code import theirs

_SAMPLED = f"hash of {SAMPLES} samples"  # of a data set whose content is not known


class InputCheck:
    """The inputs of a run, which its checkpoints store and a resume checks.

    Args:
        about: the inputs, by :func:`inputs_of`.
        accept_changes: report changes instead of raising an error.
        same_recipe: whether a checkpoint must be of this recipe. If the user names one of another
            run, it may be of another recipe.
        order_hash: returns a hash of the order of the training set, for a position.
        position: returns the position of a checkpoint that is saved now.
        say: reports to the user.
    """

    def __init__(
        self,
        about: Mapping[str, Any],
        *,
        accept_changes: bool,
        same_recipe: bool = True,
        order_hash: Callable[[int], str | None],
        position: Callable[[], int],
        say: Callable[[str], object],
    ) -> None:
        self.about = about
        self._order_hash = order_hash
        self._position = position
        self._same_recipe = same_recipe
        self._accept = accept_changes
        self._say = say

    def state_dict(self) -> dict[str, Any]:
        position = self._position()
        order = {"position": position, "hash": self._order_hash(position)}
        return {**self.about, "order": order}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Compare the inputs of a checkpoint with the current inputs.

        Raises:
            ValueError: they differ, and changes are not accepted.
        """
        there = saved.get("identity")
        if not there:
            self._say(
                "the checkpoint has no fingerprints of data and model, so nothing is compared"
            )
            return
        with damaged("the record of the inputs in the checkpoint"):
            changed = input_differences(there, self.about) + self._recipe_differences(there)
            device = there["device"]
            checksum = there["source"].get("checksum")
        if changed and not self._accept:
            raise ValueError(
                f"inputs of the run have changed: {'; '.join(changed)}; restore it, choose another "
                "run.dir, or continue with --run.accept_changes true"
            )
        for line in changed:
            self._say(f"accepted: {line}")

        # A different device is not an error, but it rounds and draws differently.
        if device != self.about["device"]:
            self._say(
                f"the run continues on {self.about['device']}; before: {device}. It sees the same "
                "samples, but rounds differently, and dropout draws other random numbers"
            )

        # Another source of the task is no error: the user may have corrected it.
        now = self.about["source"]
        if checksum != now.get("checksum"):
            self._say(
                f"the source of the task has changed ({now.get('file', 'unknown file')}): the run "
                "continues with the new source"
            )

    def _recipe_differences(self, there: Mapping[str, Any]) -> list[str]:
        """Return the keys of what is trained that differ from the recipe of a checkpoint."""
        if not self._same_recipe:
            return []
        from oneloop.recipe.comparison import difference, only_extends

        old = there["recipe"]
        new = self.about["recipe"]
        changed = [] if only_extends(old, new) else difference(old, new)
        order = there["order"]
        if not changed and self._order_hash(order["position"]) != order["hash"]:
            changed.append(
                "the order of the training set: order() gives other samples than in the run; let "
                "it depend on its arguments only"
            )
        return changed


def input_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the inputs of two runs, one line for each."""
    found = data_differences(before, now) + differences(before["model"], now["model"])
    if before["computed"] and now["computed"]:
        for line in differences(before["computed"], now["computed"]):
            found.append(f"batch.grain promises bit-identical results, but {line}")
    return found


def data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of the data; one that several sets share is listed once.

    Args:
        before: the recorded inputs.
        now: the current ones.
    """
    from oneloop.recipe.comparison import same_data_path

    found: list[str] = []
    reported: dict[str, list[str]] = {}  # names of data sets by difference of their content
    for name in {**before["data"], **now["data"]}:
        there = before["data"].get(name)
        here = now["data"].get(name)
        if there is None or here is None:
            found.append(f"the {name} set is {'new' if there is None else 'missing'}")
            continue
        for line in differences(there, here):
            reported.setdefault(line, []).append(name)
    for line, names in reported.items():
        found.append(f"data ({', '.join(names)}): {line}")

    # If only some samples of a set are known, another path may hold other data.
    sampled = any(_SAMPLED in content for content in now["data"].values())
    if sampled and not found and not same_data_path(before["recipe"], now["recipe"]):
        path_before = before["recipe"]["task"]["data"]
        path_now = now["recipe"]["task"]["data"]
        found.append(f"task.data: {path_before!r} -> {path_now!r}, and its content is not known")
    return found


def inputs_of(job: Job, run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """Return the inputs of the job as plain data. Call it on rank 0 only; it reads some samples.

    A data set has no checksum if its samples differ each time they are loaded."""
    named = [(bare_name(name), parameter) for name, parameter in job.model.named_parameters()]
    trained = [name for name, parameter in named if parameter.requires_grad]
    workers = run.workers(job.recipe.machine.workers)
    structure = job.built.structure.splitlines()
    if len(job.built.structure) >= 1 << 15:
        structure = [_digest(job.built.structure)]
    return {
        "data": data_of(job.task, job.sets, seed=job.recipe.seed, workers=workers),
        "model": {
            "structure of the model": {f"line {n}": line for n, line in enumerate(structure, 1)},
            "trained parameters": f"{len(trained)} of {len(named)}",
            "names of trained parameters": _digest(" ".join(trained)),
            "precision": f"{run.accelerator.mixed_precision}, weights in "
            f"{job.recipe.machine.dtype}",
            "learning rates": [group.get(LR_FACTOR, 1.0) for group in optimizer.param_groups],
            "steps along which the loss changes": job.steps * hasattr(job.task, "progress"),
        },
        "source": source_of(type(job.task)),
        "recipe": dict(job.recipe.resolved),
        "device": run.device.type,
        "computed": computed_by(job.recipe, run.device) if job.exact else None,
    }


def _digest(text: str) -> str:
    return xxh3_64_hexdigest(text.encode())


def data_of(
    task: Any, sets: Mapping[str, Any], *, seed: int, workers: int = 0
) -> dict[str, dict[str, Any]]:
    """Return a fingerprint of each data set: its own, or a hash of some samples.

    With data workers, one of them reads these samples.
    """
    found: dict[str, dict[str, Any]] = {}
    unknown = {}
    for name, dataset in sets.items():
        content = theirs(task, _member(name), partial(fingerprint_of, dataset))
        found[name] = {"samples": len(dataset), **(content or {})}
        if not content:
            unknown[name] = dataset
    if unknown:
        hashes = sample_hashes(task, unknown, partial(spread_checksum, seed), workers=workers)
        for name, value in hashes.items():
            found[name][_SAMPLED] = value
    return found


def sample_hashes(
    task: Any,
    sets: Mapping[str, Any],
    checksum_of: Callable[[Any], str | None],
    *,
    workers: int,
) -> dict[str, str | None]:
    """Return a hash of some samples of each data set by name; None: they differ each time.

    Args:
        task: for messages.
        sets: the data sets by name.
        checksum_of: returns the hash of a data set.
        workers: of the run; if there are any, one reads the samples.
    """
    hashes: dict[str, str | None] = read_once(
        partial(_checksums, task, sets, checksum_of), workers=workers
    )
    return hashes


@placeholder_outputs()
def _checksums(
    task: Any, sets: Mapping[str, Any], checksum_of: Callable[[Any], str | None]
) -> dict[str, str | None]:
    return {
        name: theirs(task, _member(name), partial(checksum_of, dataset))
        for name, dataset in sets.items()
    }


def _member(name: str) -> str:
    """Return the method of the task that returned the data set of this name."""
    return "train_set()" if name == "train" else "eval_sets()"
