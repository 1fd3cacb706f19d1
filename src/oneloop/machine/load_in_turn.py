"""The processes of a host build the model one after another.

So only one copy at a time is in memory.

The first process writes its weights to a file, which all processes map; FSDP2 then shards the
mapped weights. If a weight differs on another process, that process keeps its own weight, so that
the file changes no model.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import nn

from oneloop.basics.launcher import local_ranks
from oneloop.basics.untrusted import delete

_ALIGNED = 64  # bytes


def in_turn(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model of ``make``, with its parameters in a mapped file.

    Call it on every process of a host. The file is stored in the temporary folder (``TMPDIR``), and
    is deleted once the last process has mapped it. Raise OSError if the disk is full.
    """
    if local_ranks() == 1:
        return make()

    # The processes of a run have one parent, and one port.
    name = f"oneloop-{os.getuid()}-{os.getppid()}-{os.environ.get('MASTER_PORT', 0)}"
    folder = Path(tempfile.gettempdir()) / name
    folder.mkdir(mode=0o700, exist_ok=True)

    # Build the model while the others wait. The last process deletes the folder.
    with FileLock(folder.with_suffix(".lock")):
        model = make()
        _map(model, folder / "weights")
        done = len(list(folder.glob("done-*"))) + 1
        if done == local_ranks():
            delete(folder, inside=folder.parent)
        else:
            (folder / f"done-{os.getpid()}").touch()
    return model


@torch.no_grad()
def _map(model: nn.Module, file: Path) -> None:
    """Write the parameters to the file if it is missing, and map those that are equal in it."""
    # Place each parameter at a multiple of 64 bytes.
    offsets = []
    size = 0
    for parameter in model.parameters():
        offsets.append((size, parameter))
        size += -(-parameter.nbytes // _ALIGNED) * _ALIGNED

    # Write the file. A file of another size is of another model.
    if not file.exists():
        with file.with_suffix(".draft").open("wb") as stream:
            for start, parameter in offsets:
                stream.seek(start)
                stream.write(_bytes(parameter.contiguous()).numpy().data)
            stream.truncate(size)
        file.with_suffix(".draft").rename(file)
    elif file.stat().st_size != size:
        return

    # Map the file, and drop the copies in memory.
    held = torch.from_numpy(np.memmap(file, mode="c"))  # copy on write
    for start, parameter in offsets:
        mapped = held[start : start + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        if parameter.is_contiguous() and torch.equal(
            mapped.view(-1).view(torch.uint8), _bytes(parameter)
        ):
            parameter.data = mapped


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().view(-1).view(torch.uint8)
