"""Check that all ranks have the same data, model and folder.

Otherwise the run could hang or train a wrong model.
"""

import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from oneloop.basics.content_hash import content_hash, is_strided
from oneloop.basics.differences import Texts, differences, listed
from oneloop.basics.exit_codes import BadInput
from oneloop.job.build import Job
from oneloop.launch.processes import Run
from oneloop.run.compatibility import ORDER, input_differences
from oneloop.run.source_code import sources

_HASHED = 1 << 20  # elements of a tensor that are hashed, at most
_SECONDS = 10.0  # until a file from another machine appears on shared storage


def reject_other_jobs(job: Job, run: Run) -> None:
    """Raise BadInput if the ranks have different inputs, or models with other values.

    Collective: call on every rank.
    """
    with run.setting_up():
        mine: Texts = {**job.inputs, ORDER: job.order_hash(), **_values_of(job.model)}
        code = sources()
    reports = run.gathered((mine, code))

    # All ranks compare the same reports, so all of them raise the same error.
    first, first_code = reports[0]
    for rank, (inputs, code) in enumerate(reports):
        lines = input_differences(first, inputs)
        # A module that only one of them has imported is not compared.
        lines |= differences(first_code, {name: code.get(name) for name in first_code})
        if lines:
            raise BadInput(
                f"the ranks differ (rank 0 -> rank {rank}): {listed(lines)}; give all of them the "
                "same data, model and code; let model() draw from the global generators of torch, "
                "numpy or Python, which are seeded alike"
            )


def _values_of(model: nn.Module) -> Texts:
    """Return hashes of what a model holds: parameters, buffers, and other tensors and arrays.

    Args:
        model: not yet wrapped or sharded.
    """
    values: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for prefix, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor | np.ndarray):
                values[f"{prefix}.{key}".lstrip(".")] = value

    # Of a large one, hash every n-th element.
    hashes: Texts = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray) or is_strided(value):
            flat = value.reshape(-1)
            hashes[f"values of {name}"] = content_hash(flat[:: 1 + len(flat) // _HASHED])
    return hashes


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
    while _read(file) != owner and time.monotonic() < until:
        time.sleep(0.1)

    there = run.gathered((_read(file) == owner, f"{folder.absolute()} on {socket.gethostname()}"))
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
