"""Check that all ranks have the same data, model and folder; otherwise the run could hang or train
a wrong model."""

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.job.build import Job
from oneloop.launch.environment import computed_by
from oneloop.launch.processes import Run
from oneloop.run.compatibility import first_samples

_SECONDS = 10.0  # until a file from another machine appears on shared storage


def reject_other_jobs(job: Job, run: Run) -> None:
    """Raise BadInput if the ranks have different data sets or models. Collective: call on every
    rank."""
    if run.ranks == 1:
        return
    with run.setting_up():
        mine = {
            "sets": first_samples(job.task, job.sets, seed=job.recipe.seed),
            "model": _model_of(job),
        }
        mine["computed"] = computed_by(job.recipe, run.device) if job.exact else {}
    reports = run.gathered(mine)
    for name in dict.fromkeys(name for report in reports for name in report["sets"]):
        _compare(name, [report["sets"].get(name) for report in reports])
    for rank, report in enumerate(reports):
        for key, value in report["computed"].items():
            if value != reports[0]["computed"][key]:
                apart = f"{value} on rank {rank} and {reports[0]['computed'][key]} on rank 0"
                raise BadInput(f"batch.grain requires machines of one kind: the {key} is {apart}")
    models = [report["model"] for report in reports]
    for rank, model in enumerate(models):
        if model != models[0]:
            part = next(
                key for key in {**models[0], **model} if models[0].get(key) != model.get(key)
            )
            here, there = (each.get(part, "not there") for each in (models[0], model))
            apart = f"{part} is {here} on rank 0 and {there} on rank {rank}"
            raise BadInput(
                f"the model differs between ranks: {apart}; build the same model on all of them"
            )


def _model_of(job: Job) -> dict[str, str]:
    kinds = {
        name: (tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in job.model.named_parameters()
    }
    return {
        n: f"{s} {kind.removeprefix('torch.')}{'' if own else ', frozen'}"
        for n, (s, kind, own) in kinds.items()
    }


def _compare(name: str, reports: Sequence[Mapping[str, Any] | None]) -> None:
    first = reports[0]
    for rank, other in enumerate(reports):
        if first is None or other is None:
            here, there = (
                "there is" if one is not None else "there is none" for one in (first, other)
            )
            if first is not other:
                raise BadInput(
                    f"the {name} set is not on all ranks: {here} on rank 0, {there} on rank {rank}"
                )
        elif first["length"] != other["length"]:
            apart = f"{first['length']:,} samples on rank 0 and {other['length']:,} on rank {rank}"
            raise BadInput(f"the {name} set has {apart}; give every process the whole set")
        elif first["content"] and other["content"] and first["content"] != other["content"]:
            apart = (
                f"on rank 0 ({first['content']}) and on rank {rank} ({other['content']}, of the "
                "first ones)"
            )
            raise BadInput(
                f"the {name} set holds other samples {apart}; give every process the same data"
            )


def in_one_folder(folder: Path, run: Run, patience: float, *, required: bool) -> bool:
    """Return whether all ranks see the folder that rank 0 has locked; if it is ``required``, raise
    BadInput otherwise. Collective: call on every rank."""
    if run.ranks == 1:
        return True
    file = folder / "owner.json"
    owner = run.from_main(_read(file) if run.main else None)
    until = time.monotonic() + _SECONDS * (patience or 1.0)
    while (found := _read(file)) != owner and time.monotonic() < until:
        time.sleep(0.1)
    there = run.gathered((found == owner, f"{folder.absolute()} on {socket.gethostname()}"))
    for rank, (same, path) in enumerate(there):
        if not same and required:
            apart = f"on rank {rank} ({path}) than on rank 0 ({there[0][1]})"
            raise BadInput(
                f"run.dir {folder} is another folder {apart}; put it on shared storage, or set "
                "save.mirror"
            )
    return all(same for same, _ in there)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
