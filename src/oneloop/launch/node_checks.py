"""The preflight check of several nodes: versions, accelerate's settings, clocks, processes, host names, run folder."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from oneloop.launch.environment import versions
from oneloop.recipe.schema import Recipe

_CLOCK = 5.0  # seconds; a rendezvous takes a node whose clock is further off for dead
_SEEN = 5.0  # seconds until a shared file system shows a new file to the other nodes


def facts(name: str, address: str, processes: int, recipe: Recipe | None, *, first: bool) -> dict[str, Any]:
    """Return what must fit on all nodes; the first one leaves a file where it would write the run folder."""
    settings = {key: os.environ[key] for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
    found: dict[str, Any] = {"name": name, "processes": processes, "time": time.time()}
    found |= {"settings": versions() | settings, "loopback": loopback(name, address)}
    if recipe is not None and first:
        folder = next(path for path in (recipe.folder.absolute(), *recipe.folder.absolute().parents) if path.is_dir())
        found["file"] = str(folder / f".oneloop-{uuid4().hex[:8]}")
        Path(found["file"]).touch()
    return found


def foreign_folder(name: str, first: Mapping[str, Any]) -> str:
    """Return an error message if this node does not see the file of the ``first`` node; else nothing."""
    until = time.monotonic() + _SEEN
    while "file" in first and not Path(first["file"]).exists():
        if time.monotonic() > until:
            folder = Path(first["file"]).parent
            return f"{name} does not see the files of {first['name']} in {folder}; put run.dir on shared storage"
        time.sleep(0.1)
    return ""


def compared(every: Sequence[Mapping[str, Any]]) -> str:
    """Return an error message if the facts of the nodes do not fit together; else nothing."""
    first = every[0]
    for other in every[1:]:
        if other["processes"] != first["processes"]:
            each = ", ".join(f"{one['name']} {one['processes']}" for one in every)
            return f"the nodes have unequal numbers of processes: {each}; give the smallest as --processes_per_node"
        for key in first["settings"].keys() | other["settings"].keys():
            both = [one["settings"].get(key, "none") for one in (first, other)]
            if both[0] != both[1]:
                where = f"{both[0]} on {first['name']} and {both[1]} on {other['name']}"
                return f"{key} is {where}; use the same version or setting on all nodes"
        if abs(apart := other["time"] - first["time"]) > _CLOCK:
            return f"the clocks of {first['name']} and {other['name']} differ by {abs(apart):.0f} s; set them (NTP)"
    return next((one["loopback"] for one in every if one["loopback"] and len(every) > 1), "")


def loopback(name: str, address: str) -> str:
    """Return an error message if gloo would connect to this node by a loopback address; else nothing."""
    if address.startswith("127.") or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    own = "no address"
    with suppress(OSError):
        own = socket.gethostbyname(socket.gethostname())
    if own[0].isdigit() and not own.startswith("127."):
        return ""
    cards = psutil.net_if_addrs().items()
    interface = next((card for card, known in cards if address in [one.address for one in known]), "INTERFACE")
    advice = f"export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"
    return f"the host name of {name} resolves to {own}, which no other node can reach; {advice}"
