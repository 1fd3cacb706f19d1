"""Check that all ranks have the same data, model and folder.

Otherwise the run could hang or train a wrong model.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.tensor_hash import tensor_hashes
from oneloop.data.fingerprint import rank_difference
from oneloop.data.sample_checksums import first_checksum
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.run.compatibility import sample_hashes
from oneloop.run.environment import computed_by
from oneloop.run.source_code import sources

_HASHED = 1 << 30  # bytes of a model that are hashed
_SECONDS = 10.0  # until a file from another machine appears on shared storage


@dataclass(frozen=True)
class _Report:
    """What one rank has."""

    fingerprint: dict[str, Any]  # of data sets, their order, the model, and the machine
    sources: dict[str, str]  # of several hosts: checksums of the sources that are not installed
    values: dict[str, int]  # hash of each tensor of the model
    host: str = field(default_factory=socket.gethostname)


def reject_other_jobs(job: Job, run: Run) -> None:
    """Raise BadInput if the ranks have different data sets or models.

    Collective: call on every rank.
    """
    one_host = run.local_ranks == run.ranks
    with run.setting_up():
        workers = run.workers(job.recipe.machine.workers)
        first_of = partial(first_checksum, job.recipe.seed)
        hashes = sample_hashes(job.task, job.sets, first_of, workers=workers)
        machine = computed_by(job.recipe, run.device) if job.exact else {}
        mine = _Report(
            fingerprint={
                "the order of the training set": job.order_hash(),
                "the model": _model_of(job),
                "the machine for batch.grain": machine,
            },
            sources={} if one_host else sources(type(job.task)),
            values=_values_of(job.model),
        )
        for name, dataset in job.sets.items():
            mine.fingerprint[f"the {name} set"] = {
                "length": len(dataset),
                "hash of the first samples": hashes[name],
            }
    reports: list[_Report] = run.gathered(mine)

    # A module that only some ranks have imported is not compared.
    for report in reports:
        common = {name: report.sources.get(name) for name in reports[0].sources}
        report.fingerprint["the source"] = common

    # All ranks compare the same reports, so all of them raise the same error.
    different = rank_difference([report.fingerprint for report in reports])
    if different:
        hosts = dict.fromkeys(report.host for report in reports)
        raise BadInput(
            f"the ranks differ: {different} (hosts: {', '.join(hosts)}); give all of them the "
            "same data, model and code"
        )
    _compare_values(job, run, [report.values for report in reports])


def _model_of(job: Job) -> dict[str, str]:
    described = {}
    for name, parameter in job.model.named_parameters():
        text = f"{tuple(parameter.shape)} {str(parameter.dtype).removeprefix('torch.')}"
        if not parameter.requires_grad:
            text += ", frozen"
        described[name] = text
    return described


def _values_of(model: nn.Module) -> dict[str, int]:
    """Return hashes of what a model holds: parameters, buffers, and other tensors and arrays.

    ``model``: not yet wrapped or sharded.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= dict(model.named_buffers())
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, np.ndarray) and value.dtype.kind in "iuf" and value.itemsize <= 8:
                value = torch.from_numpy(np.ascontiguousarray(value))
            if type(value) is Tensor and value.layout is torch.strided:
                tensors[f"{prefix}.{key}".lstrip(".")] = value
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "meta"}

    # Of a large model, hash every n-th element.
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    each = 1 + total // _HASHED
    parts = [tensor.detach().reshape(-1)[::each] for tensor in tensors.values()]
    return dict(zip(tensors, tensor_hashes(parts), strict=True))


def _compare_values(job: Job, run: Run, reports: Sequence[Mapping[str, int]]) -> None:
    """Raise BadInput if the ranks have built different models, or report it.

    DDP sends rank 0's parameters and buffers to all ranks. Under FSDP2, each rank keeps shards of
    the model that it built. Other tensors of a module are never sent.
    """
    sent = {name for name, _ in (*job.model.named_parameters(), *job.model.named_buffers())}
    replaced = ""
    for rank, report in enumerate(reports):
        for name, value in reports[0].items():
            if report.get(name, value) == value:
                continue
            if name in sent and not (run.sharded or job.exact):
                replaced = replaced or name
                continue
            raise BadInput(
                f"the model differs between ranks: {name} has other values on rank 0 and on rank "
                f"{rank}; let model() draw from the global generators of torch, numpy or Python, "
                "which are seeded alike on all of them"
            )
    if replaced:
        run.display.say(
            f"the model differs between ranks: {replaced} has other values on rank 0; DDP trains "
            "these"
        )


def in_one_folder(folder: Path, run: Run, patience: float, *, required: bool) -> bool:
    """Compare the run folders of all ranks. Collective: call on every rank.

    Args:
        folder: the run folder, which rank 0 has locked.
        run: this process.
        patience: factor of the time that a file may take to appear on another machine.
        required: whether it is an error if a rank sees another folder.

    Returns:
        Whether all ranks see the folder of rank 0.

    Raises:
        BadInput: a rank sees another folder, and it is ``required``.
    """
    # Wait until this rank sees the file that rank 0 wrote.
    file = folder / "owner.json"
    owner = run.from_main(_read(file) if run.main else None)
    until = time.monotonic() + _SECONDS * (patience or 1.0)
    found = _read(file)
    while found != owner and time.monotonic() < until:
        time.sleep(0.1)
        found = _read(file)

    there = run.gathered((found == owner, f"{folder.absolute()} on {socket.gethostname()}"))
    for rank, (same, path) in enumerate(there):
        if not same and required:
            raise BadInput(
                f"run.dir {folder} is another folder on rank {rank} ({path}) than on rank 0 "
                f"({there[0][1]}); put it on shared storage, or set save.mirror"
            )
    return all(same for same, _ in there)


def _read(file: Path) -> str | None:
    try:
        return file.read_text()
    except OSError:
        return None
