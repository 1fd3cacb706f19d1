"""One process of a host after another makes its model, so that one copy at a time is in memory.

The first keeps its weights in a file, which is mapped by all: what is then sharded is read from it. A weight that comes
out otherwise on another process stays that process's own, so that nothing is changed by it.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import nn

_ALIGNED = 64  # bytes


def local_processes() -> int:
    """Processes of the run on this host."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def in_turn(make: Callable[[], nn.Module]) -> nn.Module:
    """What ``make`` returns, with its parameters in a mapped file. Every process of a host must get here.

    The file lies in the folder for temporary files (``TMPDIR``), and is gone when the last one has mapped it.

    Raises:
        OSError: there is no room for it.
    """
    if local_processes() == 1:
        return make()
    folder = Path(tempfile.gettempdir()) / f"oneloop-{os.getuid()}-{os.getppid()}-{os.environ.get('MASTER_PORT', 0)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        model = make()
        _map(model, folder / "weights")
        done = len(list(folder.glob("done-*"))) + 1
        if done == local_processes():
            shutil.rmtree(folder)
        else:
            (folder / f"done-{os.getpid()}").touch()
    return model


@torch.no_grad()
def _map(model: nn.Module, file: Path) -> None:
    """Puts the parameters into the file, or takes from it those that it holds already."""
    places, size = [], 0
    for parameter in model.parameters():
        places.append((size, parameter))
        size += -(-parameter.numel() * parameter.element_size() // _ALIGNED) * _ALIGNED
    if not file.exists():
        with file.with_suffix(".draft").open("wb") as stream:
            for start, parameter in places:
                stream.seek(start)
                stream.write(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
            stream.truncate(size)
        file.with_suffix(".draft").rename(file)
    elif file.stat().st_size != size:
        return
    held = torch.from_numpy(np.memmap(file, mode="c"))  # copied where it is written to
    for start, parameter in places:
        length = parameter.numel() * parameter.element_size()
        mapped = held[start : start + length].view(parameter.dtype).view(parameter.shape)
        if parameter.is_contiguous() and torch.equal(mapped.view(-1).view(torch.uint8), _bytes(parameter)):
            parameter.data = mapped


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().view(-1).view(torch.uint8)
