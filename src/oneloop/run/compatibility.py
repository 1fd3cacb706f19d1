"""The inputs of a run (data, model, precision, recipe), which checkpoints store and a resume
compares."""

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.optim import Optimizer
from xxhash import xxh3_64, xxh3_64_hexdigest

from oneloop.basics.parameter_names import bare_name
from oneloop.checkpoint.store import Store
from oneloop.data.rows.cache import changes, fingerprint_of
from oneloop.data.seeded_samples import SeededSamples
from oneloop.job.build import Job
from oneloop.launch.environment import computed_by
from oneloop.launch.processes import Run
from oneloop.optim.parameter_groups import LR_FACTOR
from oneloop.recipe.class_paths import CHOICES, resolve, source
from oneloop.recipe.comparison import same_data_path
from oneloop.recipe.schema import Recipe
from oneloop.tasks.protocol_checks import theirs

SAMPLES = 16  # samples of each data set that a resume compares, evenly spaced
FIRST = 2  # first samples of each data set that all ranks compare


class InputCheck:
    """The inputs of a run (see :func:`inputs_of`), which its checkpoints store and a resume
    checks."""

    def __init__(
        self, about: Mapping[str, Any], *, accept_changes: bool, say: Callable[[str], object]
    ) -> None:
        self.about, self._accept, self._say = about, accept_changes, say

    def state_dict(self) -> dict[str, Any]:
        return dict(self.about)

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise ValueError if a checkpoint's inputs differ from the current inputs, unless changes
        are accepted."""
        if not (there := saved.get("identity")):
            self._say(
                "the checkpoint has no fingerprints of data and model (older oneloop): nothing "
                "to compare"
            )
            return
        changed = differences(there, self.about)
        if changed and not self._accept:
            ways = "restore it, choose another run.dir, or continue with --run.accept_changes true"
            raise ValueError(f"inputs of the run have changed: {'; '.join(changed)}; {ways}")
        for line in changed:
            self._say(f"accepted: {line}")
        before, now = there.get("source") or {}, self.about.get("source") or {}
        if before.get("checksum") != now.get("checksum"):
            self._say(
                f"the source of the task has changed ({now.get('file')}): the run continues "
                "with the new source"
            )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between the inputs of two runs, one line for each."""
    found = data_differences(before, now)
    if before["model"] != now["model"]:
        pairs = zip(before["model"].splitlines(), now["model"].splitlines(), strict=False)
        one = next(
            (f"{a.strip()!r} -> {b.strip()!r}" for a, b in pairs if a != b),
            "it has more or fewer data sets",
        )
        found.append(f"the model's structure: {one}")
    for key, what in (
        ("trained", "trained parameters"),
        ("precision", "precision"),
        ("rates", "learning rates"),
    ):
        if before[key] != now[key]:
            found.append(f"{what}: {before[key]} -> {now[key]}")
    if "follows" in before and "follows" in now and before["follows"] != now["follows"]:
        found.append(
            f"the steps of the run, along which the loss changes: {before['follows']} -> "
            f"{now['follows']}"
        )
    computed = before.get("computed") or {}, now.get("computed") or {}
    for key in dict.fromkeys(key for each in computed if all(computed) for key in each):
        there, here = (each.get(key) for each in computed)
        if there != here:
            found.append(
                "batch.grain promises bit-identical results, but "
                f"{_computed_otherwise(key, there, here)}"
            )
    return found


def _computed_otherwise(key: str, there: Any, here: Any) -> str:
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return f"{key}: {there} -> {here}"
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return f"{key}: {', '.join(f'{name} {there.get(name)} -> {here.get(name)}' for name in names)}"


def data_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences of the data; one that several sets share is listed once."""
    reported: dict[str, list[str]] = {}
    found, compared = [], True
    for name in dict.fromkeys([*before["data"], *now["data"]]):
        there, here = before["data"].get(name), now["data"].get(name)
        if there is None or here is None:
            found.append(f"the {name} set is {'new' if there is None else 'missing'}")
        elif there.get("content") and here.get("content"):
            for line in changes(there["content"], here["content"]):
                reported.setdefault(line, []).append(name)
        else:
            compared = False
            if there["length"] != here["length"]:
                found.append(
                    f"the {name} set has {here['length']:,} samples; before: {there['length']:,}"
                )
            elif (
                there.get("checksum") != here.get("checksum")
                and there.get("checksum")
                and here.get("checksum")
            ):
                found.append(
                    f"the {name} set has as many samples, but some of {SAMPLES} compared ones "
                    "differ"
                )
    if not compared and not found and not same_data_path(before["recipe"], now["recipe"]):
        before_, now_ = (one["recipe"]["task"]["data"] for one in (before, now))
        found.append(f"task.data: {before_!r} -> {now_!r}, and its content is not known")
    return found + [f"data ({', '.join(names)}): {line}" for line, names in reported.items()]


def inputs_of(job: Job, run: Run, optimizer: Optimizer) -> dict[str, Any]:
    """Return the inputs of the job as plain data. Call it on rank 0 only; it loads some samples.

    A data set has no checksum if its samples differ each time they are loaded."""
    named = [(bare_name(name), parameter) for name, parameter in job.model.named_parameters()]
    trained = [name for name, parameter in named if parameter.requires_grad]
    structure = job.built.structure
    return {
        "data": data_of(job.task, job.sets, seed=job.recipe.seed),
        "model": structure if len(structure) < 1 << 15 else _digest(structure),
        "trained": f"{len(trained)} of {len(named)}, {_digest(' '.join(trained))}",
        "precision": f"{run.accelerator.mixed_precision}, weights in {job.recipe.machine.dtype}",
        "rates": [group.get(LR_FACTOR, 1.0) for group in optimizer.param_groups],
        "source": source_of(type(job.task)),
        "follows": job.steps if hasattr(job.task, "progress") else None,
        "recipe": dict(job.recipe.resolved),
        "computed": computed_by(job.recipe, run.device) if job.exact else None,
    }


def _digest(text: str) -> str:
    return xxh3_64_hexdigest(text.encode())


def data_of(task: Any, sets: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    """Return length and content of each data set by name, or a checksum of 16 samples if its
    content is unknown."""
    return {name: _of_set(task, name, dataset, seed) for name, dataset in sets.items()}


def _of_set(task: Any, name: str, dataset: Any, seed: int) -> dict[str, Any]:
    keyed, number = SeededSamples(dataset, seed=seed), len(dataset)
    member = "train_set()" if name == "train" else "eval_sets()"
    indices = sorted({k * number // SAMPLES for k in range(SAMPLES)})

    def load() -> str | None:
        first = checksum([keyed[0, indices[0]]])
        whole = checksum(keyed[0, index] for index in indices)
        return whole if checksum([keyed[0, indices[0]]]) == first else None

    if content := theirs(task, member, lambda: fingerprint_of(dataset)):
        return {"length": number, "content": content}
    return {"length": number, "checksum": theirs(task, member, load)}


def first_samples(task: Any, sets: Mapping[str, Any], *, seed: int) -> dict[str, Any]:
    """Return the length of each set, and a checksum of its first samples; None if they are
    random."""

    def load(dataset: Any) -> str | None:
        keyed, indices = SeededSamples(dataset, seed=seed), range(min(FIRST, len(dataset)))
        first, second = (checksum(keyed[0, index] for index in indices) for _ in range(2))
        return first if first == second else None

    return {
        name: {
            "length": len(dataset),
            "content": theirs(
                task,
                "train_set()" if name == "train" else "eval_sets()",
                lambda: load(dataset),  # noqa: B023
            ),
        }
        for name, dataset in sets.items()
    }


def checksum(values: Any) -> str:
    """Return the xxh3-64 of tensors, arrays, strings, numbers, containers and attributes; else of
    the class name."""
    state = xxh3_64()

    def take(value: Any, depth: int = 0) -> None:
        state.update(type(value).__name__.encode())
        if depth > 8:  # objects may refer to each other
            return
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_nested:
                return
            state.update(f"{value.dtype}{tuple(value.shape)}".encode())
            state.update(
                value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        elif isinstance(value, np.ndarray) and value.dtype != object:
            state.update(
                f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
            )
        elif isinstance(value, str | bytes):
            state.update(value.encode(errors="surrogatepass") if isinstance(value, str) else value)
        elif isinstance(value, int | float | complex | np.generic) or value is None:
            state.update(repr(value).encode())
        elif isinstance(value, Mapping):
            for name in sorted(value, key=str):
                take(str(name), depth + 1)
                take(value[name], depth + 1)
        elif hasattr(value, "tobytes") and hasattr(value, "size"):  # a PIL image
            state.update(repr(value.size).encode() + value.tobytes())
        elif isinstance(value, set | frozenset):
            take(sorted(checksum([inside]) for inside in value), depth + 1)
        elif isinstance(value, list | tuple):
            for inside in value:
                take(inside, depth + 1)
        elif hasattr(value, "__dict__"):
            take(vars(value), depth + 1)

    for value in values:
        take(value)
    return state.hexdigest()


def another_file(recipe: Recipe, run: Path) -> str:
    """Return a sentence if the run in this folder used a task from another file, which still
    exists; else empty."""
    file = source("task", recipe.task.name)
    try:
        there = Path(str(json.loads((run / "environment.json").read_text())["task"]))
        if (
            file is None
            or there.suffix != ".py"
            or there.samefile(file)
            or there.read_bytes() == file.read_bytes()
        ):
            return ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"was trained with the task of {there}; the task is now {file}"


def source_changed(recipe: Recipe, run: Path) -> str:
    """Return a sentence if the source of the user's task has changed since the last save in this
    folder; else empty."""
    if recipe.task.name in CHOICES["task"] or not (sealed := Store(run / "checkpoints").sealed()):
        return ""
    try:
        there = json.loads((sealed[-1] / "state.json").read_text())["identity"]["source"]
        now = source_of(cast(type, resolve("task", recipe.task.name)))
    except (OSError, ValueError, KeyError):
        return ""
    if there.get("checksum") == now.get("checksum"):
        return ""
    return (
        f"the source of its task ({now.get('file')}) has changed since: choose another run.dir to "
        "train it"
    )


def source_of(kind: type) -> dict[str, str]:
    """Return file and checksum of a task's source; for a class in a notebook, of its functions."""
    try:
        file = str(inspect.getsourcefile(kind))
        content = Path(file).read_bytes()
    except (TypeError, OSError):  # no file: a notebook knows the source of functions
        try:
            file = kind.__qualname__
            own = [
                inspect.getsource(part) for part in vars(kind).values() if inspect.isfunction(part)
            ]
            content = "".join(own).encode()
        except (TypeError, OSError):
            return {}
    return {"file": file, "checksum": xxh3_64_hexdigest(content)}
