"""The checks of nodes.

Before a run of several nodes: versions, accelerate's settings, processes, host names, run
folder. For ``oneloop doctor`` also devices, limits and disks of each node.
"""

import csv
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict
from uuid import uuid4

import psutil
import torch

from oneloop.basics.files import cache_folder, replacing
from oneloop.basics.system.processes import usable_cores
from oneloop.run.environment import versions

_SEEN = 5.0  # seconds until a shared file system shows a new file to the other nodes

_SHARED_MEMORY = 512 << 20  # least free bytes of /dev/shm
_DISK = 1 << 30  # least free bytes of a disk
_LEAST = 1024 if sys.platform == "linux" else 256  # that these limits should allow: the defaults
_LIMITS = {
    "open files (ulimit -n)": resource.RLIMIT_NOFILE,
    "processes (ulimit -u)": resource.RLIMIT_NPROC,
}
_COLUMNS = {  # of nvidia-smi, and what a value other than 0 or No means
    "ecc.errors.uncorrected.volatile.total": (
        "has uncorrected ECC errors; reset it, and replace it if they come back"
    ),
    "retired_pages.pending": "must be reset before it replaces bad memory",
    "clocks_event_reasons.hw_slowdown": "is slowed down by heat or power; check both",
}
_SMI = f"nvidia-smi --query-gpu=index,{','.join(_COLUMNS)} --format=csv,noheader"
_KERNEL_LOG = "dmesg", "journalctl --dmesg --no-pager"


class NodeFacts(TypedDict):
    """What the nodes of a run compare before it starts, as it is sent to the others.

    Another version of oneloop may send more.
    """

    name: str
    processes: int  # on this node
    settings: dict[str, str]  # versions of packages, and variables of accelerate
    loopback: str  # error message if gloo would connect by a loopback address, or empty
    file: str  # of the first node, which all nodes must see; empty: not written


@contextmanager
def shared_file(run_folder: Path | None, *, first: bool) -> Iterator[str]:
    """Create a file that all nodes must see, where the run folder would be written.

    Yield its path, or an empty text if it is not written. It is deleted at the end.

    Args:
        run_folder: None if the nodes need not share it.
        first: whether this is the first node; the others write no file.
    """
    written = ""
    if first and run_folder is not None:
        file = existing(run_folder) / f".oneloop-{uuid4().hex[:8]}"
        with suppress(OSError):  # the run itself reports a folder that cannot be written
            file.touch()
            written = str(file)
    try:
        yield written
    finally:
        if written:
            file.unlink(missing_ok=True)


def facts(name: str, address: str, processes: int, file: str) -> NodeFacts:
    """Return what must fit on all nodes.

    Args:
        name: of this node, for messages.
        address: by which the other nodes reach it.
        processes: on this node.
        file: that of :func:`shared_file`.
    """
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
    settings = {key: value for key, value in os.environ.items() if key.startswith(prefixes)}
    return NodeFacts(
        name=name,
        processes=processes,
        settings=versions() | settings,
        loopback=loopback(name, address),
        file=file,
    )


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if os.path.isdir(path))


def foreign_folder(name: str, first: NodeFacts) -> str:
    """Return an error message if this node does not see the ``first`` node's file; else nothing."""
    file = first.get("file")
    until = time.monotonic() + _SEEN
    while file and not Path(file).exists():
        if time.monotonic() > until:
            return (
                f"{name} does not see the files of {first['name']} in {Path(file).parent}; put "
                "run.dir on shared storage"
            )
        time.sleep(0.1)
    return ""


def compared(every: Sequence[NodeFacts]) -> Iterator[str]:
    """Yield an error message for each fact of the nodes that does not fit together."""
    # Compare each node with the first one.
    first = every[0]
    for other in every[1:]:
        if other["processes"] != first["processes"]:
            each = ", ".join(f"{one['name']} {one['processes']}" for one in every)
            yield (
                f"the nodes have unequal numbers of processes: {each}; give the smallest as "
                "--processes_per_node"
            )

        for key in sorted(first["settings"].keys() | other["settings"].keys()):
            # a package or variable that one node lacks counts as "none"
            ours = first["settings"].get(key, "none")
            theirs = other["settings"].get(key, "none")
            if ours != theirs:
                yield (
                    f"{key} is {ours} on {first['name']} and {theirs} on {other['name']}; use the "
                    "same version or setting on all nodes"
                )

    # One node connects to no other.
    if len(every) > 1:
        yield from (one["loopback"] for one in every if one["loopback"])


def loopback(name: str, address: str) -> str:
    """Return an error message if gloo would connect to this node by a loopback address.

    Else return an empty text.
    """
    if address.startswith("127.") or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    own = "no address"
    with suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
    if own[0].isdigit() and not own.startswith("127."):
        return ""
    interface = _interface(address)
    return (
        f"the host name of {name} resolves to {own}, which no other node can reach; "
        f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    )


def _interface(address: str) -> str:
    """Return the name of the network interface with this address."""
    for card, known in psutil.net_if_addrs().items():
        if address in [one.address for one in known]:
            return str(card)
    return "INTERFACE"


def local_problems(folder: Path) -> Iterator[str]:
    """Yield the problems of this host. ``folder`` is the run folder, which need not exist."""
    yield from _devices()
    yield from _limits()
    yield from _folder("run folder", folder, "choose another run.dir")
    yield from _folder("cache folder", cache_folder(), "set ONELOOP_CACHE to another")


def _output(*commands: str) -> str:
    """Return what the first command prints that is installed and does not fail.

    Return an empty text if all fail.
    """
    for command in commands:
        with suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(
                command.split(), capture_output=True, text=True, timeout=20, check=True
            ).stdout
    return ""


def _devices() -> Iterator[str]:
    # A driver without a GPU is a mistake, and not a host without GPUs.
    if Path("/proc/driver/nvidia/version").exists() and not torch.cuda.is_available():
        build = f"torch {torch.__version__} (CUDA {torch.version.cuda or 'not built in'})"
        yield (
            f"there is an NVIDIA driver, and {build} finds no GPU; check CUDA_VISIBLE_DEVICES and "
            "nvidia-smi"
        )

    # Multiply on each GPU.
    for number in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(1024, 1024, device=f"cuda:{number}")
            if not bool((ones @ ones == 1024).all()):
                yield f"GPU {number} multiplies wrongly; do not train on it"
        except RuntimeError as error:
            yield (
                f"GPU {number} fails ({str(error).splitlines()[0]}); see nvidia-smi, and reset or "
                "exclude it"
            )

    # Read what the driver reports.
    yield from gpu_problems(_output(_SMI))
    yield from xid_errors(_output(*_KERNEL_LOG))


def gpu_problems(table: str) -> Iterator[str]:
    """Yield the problems in nvidia-smi's table.

    It has ECC errors, pending page retirements and slowdowns.
    """
    for number, *values in csv.reader(table.splitlines(), skipinitialspace=True):
        for value, meaning in zip(values, _COLUMNS.values(), strict=False):
            if value in ("Yes", "Active") or (value.isdigit() and value != "0"):
                yield f"GPU {number} {meaning}"


def xid_errors(kernel_log: str) -> Iterator[str]:
    """Yield the newest Xid error of each GPU in the kernel's log (NVIDIA's codes of GPU errors)."""
    # later errors of a GPU replace earlier ones
    newest = dict(re.findall(r"NVRM: Xid \(([^)]*)\): (.*)", kernel_log))
    for device, error in newest.items():
        yield (
            f"the kernel reports Xid {error[:80]} for {device}; look it up in NVIDIA's table of "
            "Xid errors"
        )


def _limits() -> Iterator[str]:
    # Data workers pass batches in shared memory.
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else _SHARED_MEMORY
    if free < _SHARED_MEMORY:
        yield (
            f"/dev/shm has {free >> 20} MiB free; data workers and NCCL need more; mount a larger "
            "one (docker run --shm-size 8g)"
        )

    # Loaders and threads need many files and processes. A negative limit is none.
    for name, kind in _LIMITS.items():
        if 0 <= resource.getrlimit(kind)[0] < _LEAST:
            yield (
                f"the limit of {name} is {resource.getrlimit(kind)[0]}; raise it to {_LEAST} or "
                "more"
            )

    # NCCL registers its buffers with the InfiniBand card.
    infiniband = any(Path("/sys/class/infiniband").glob("*"))
    if infiniband and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        yield (
            "locked memory is limited (ulimit -l), and NCCL needs it for InfiniBand; set it to "
            "unlimited"
        )


def _folder(name: str, folder: Path, other: str) -> Iterator[str]:
    for path in (folder, *folder.parents):
        if os.path.isfile(path):
            yield f"the {name} {folder}: {path} is a file; {other}"
            break

    # Write, flush and rename a file of 1 MiB, as a checkpoint would.
    there = existing(folder)
    tried = there / f".oneloop-{uuid4().hex[:8]}"
    try:
        with replacing(tried) as draft, draft.open("wb") as file:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        tried.unlink()
        free = shutil.disk_usage(there).free
        if free < _DISK:
            yield f"the disk of the {name} {there} has {free >> 20} MiB free; make room, or {other}"
    except OSError as error:
        yield (
            f"the {name} {there} cannot be written, flushed or renamed in: {error.strerror}; make "
            f"room, or {other}"
        )


def about() -> str:
    """Return a line about this host.

    It has versions, devices, cores, memory, and what cannot be checked here.
    """
    # Describe the host.
    count = torch.cuda.device_count()
    devices = {torch.cuda.get_device_name(number) for number in range(count)}
    gpus = "an Apple GPU" if torch.backends.mps.is_available() else "no GPU"
    if devices:
        gpus = f"{count} x {' and '.join(sorted(devices))}"
    host = f"{usable_cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"

    # List the checks that cannot be made.
    reads_ecc = _output(_SMI)
    reads_xid = "NVRM" in _output(*_KERNEL_LOG)  # the driver's messages begin with it
    missing = ""
    for name, reads in (("ECC", reads_ecc), ("Xid", reads_xid)):
        if devices and not reads:
            missing += f"; {name} errors are not checked"
    return f"torch {torch.__version__}, Python {platform.python_version()}, {gpus}, {host}{missing}"
