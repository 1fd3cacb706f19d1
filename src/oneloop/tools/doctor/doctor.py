"""``oneloop doctor``: check that this host can train, and that several hosts can train together."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from oneloop.basics.files import dumps, printable
from oneloop.basics.system.processes import die_with
from oneloop.basics.system.signals import on_stops
from oneloop.launch import devices
from oneloop.launch.before_imports import read_once
from oneloop.launch.command import NODE_OPTIONS, launch_options, split
from oneloop.tools.elastic.bounded_store import BoundedStore
from oneloop.tools.elastic.clocks import clock_problem, show_clock
from oneloop.tools.elastic.node_checks import (
    about,
    compared,
    facts,
    foreign_folder,
    local_problems,
    shared_file,
)
from oneloop.tools.elastic.rendezvous import exchanged, open_store
from oneloop.tools.nodes import (
    Nodes,
    accelerate_variables,
    address_towards,
    nodes,
    nodes_of_accelerate,
)

_WAIT = 60.0  # seconds to wait for the other hosts, and for all links
_TIMES = 4  # tries of a link
_FEW = 4  # of this many links, a slow one is reported
_SLOW = 3.0  # times the median


_Host = dict[str, Any]
"""What a host reports: its name, a line about it, its problems, and the facts of a node."""


@dataclass
class _Found:
    """What the hosts find out together."""

    hosts: list[_Host]
    problems: list[str] = field(default_factory=list)  # between hosts
    links: str = ""  # a line about the links; empty: not measured


def run(words: Sequence[str]) -> int:
    """Check this host and all hosts; return the exit code, 1 if there is a problem.

    ``words``: those that :func:`oneloop.tools.doctor.command.checked` has checked.
    """
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]

    # Read the options as oneloop launch does. The last word stands for a missing recipe.
    own, rest = split([*words, "no-recipe"], NODE_OPTIONS)
    given, _, settings = launch_options(rest)
    asked = nodes(own, os.environ) or nodes_of_accelerate(settings)
    known = replace(asked or Nodes(1, 1, "127.0.0.1"), rejoin=_WAIT)
    if not any(option.startswith("--config") for option in given):
        several = known.most > 1 or torch.accelerator.device_count() > 1
        rest = ["--config_file", "ddp" if several else "single", *rest]
    variables, training, processes = accelerate_variables(rest, known)
    os.environ |= variables
    folder = None  # that all hosts share; with a mirror they need not
    if training[:-1]:
        recipe = read_once(tuple(training[:-1]))
        if recipe.machine.device == "cpu":
            devices.use_cpu()
        folder = recipe.folder if recipe.mirror is None else None

    # Check this host, then all of them together.
    mine: _Host = {
        "name": socket.gethostname(),
        "about": about(),
        "problems": list(local_problems(folder or Path("runs"))),
    }
    on_stops(lambda number, _: sys.exit(128 + number))
    try:
        met = _together(known, mine, processes, folder)
    except SystemExit as stop:
        # A thread may wait in torch's store, which aborts when the interpreter ends.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(stop.code or 0))
    except (OSError, RuntimeError) as error:  # errors of torch's stores are RuntimeErrors
        why = str(error).splitlines()[0]
        if not isinstance(error, ConnectionError):
            why = (
                f"the rendezvous at {known.host}:{known.port} does not answer ({why}); check the "
                "address and its host"
            )
        met = _Found([mine], [why])
    return _report(mine, met, as_json=as_json)


def _report(mine: _Host, met: _Found, *, as_json: bool) -> int:
    """Print what was found; return the exit code."""
    # Collect the problems.
    first = met.hosts[0]
    shown = met.hosts if first is mine else [mine]  # the first host prints the problems of all
    problems = []
    for host in shown:
        problems += [f"{host['name']}: {problem}" for problem in host["problems"]]
    problems += met.problems
    failed = bool(met.problems or any(host["problems"] for host in met.hosts))

    if as_json:
        found = {"host": mine["name"], "about": mine["about"]}
        print(dumps({**found, "links": met.links, "problems": problems}))
        return int(failed)

    # Print one line for each.
    lines = [f"{mine['name']}: {mine['about']}"]
    if met.links:
        lines.append(met.links)
    lines += [f"problem: {text}" for text in problems]
    if not failed:
        lines.append("no problem")
    elif problems:
        lines.append(f"problems: {len(problems)}")
    else:
        lines.append(f"problems: see {first['name']}")
    print(printable("\n".join(lines)))
    return int(failed)


def _together(known: Nodes, mine: _Host, processes: int, folder: Path | None) -> _Found:
    """Return what the hosts find out together. Raise OSError, RuntimeError.

    With several hosts, the address is added to the name of ``mine``.
    """
    # Open the store, and take a number.
    store: TCPStore | BoundedStore
    if known.most == 1:
        address = "127.0.0.1"
        store = TCPStore(address, 0, is_master=True)
        holds = True
        known = replace(known, host=address, port=store.port)
    else:
        address = address_towards(known.host, known.port)
        mine["name"] += f" ({address})"
        store, holds = open_store(known)
        if holds:
            show_clock(store, mine["name"])
        else:
            mine["problems"] += filter(None, [clock_problem(store, mine["name"])])
    number = store.add("joined", 1) - 1
    hosts = known.least
    if number >= hosts:
        return _Found(
            [mine], [f"{hosts} hosts came before this one; start {hosts} hosts, or raise --nodes"]
        )

    with shared_file(folder, first=number == 0) as file:
        mine |= facts(mine["name"], address, processes, file)

        # Compare the facts of all hosts.
        every: list[Any] = exchanged(store, "facts", mine, number, hosts, _WAIT)
        every[number] = mine
        unseen = foreign_folder(mine["name"], every[0])
        seen = exchanged(store, "seen", unseen, number, hosts)
        met = _Found(every, [*compared(every), *filter(None, seen)])

        # Measure the links if the processes can connect at all.
        ranks = hosts * processes
        equal = len({one["processes"] for one in every}) == 1
        if ranks > 1 and equal and not any(one["loopback"] for one in every):
            links = _links(known, number * processes, processes, ranks)
            times: list[Any] = []
            names: list[str] = []
            of_hosts = exchanged(store, "links", links, number, hosts, _WAIT + 15)
            for host, of_ranks in zip(every, of_hosts, strict=True):
                times += of_ranks
                names += [host["name"]] * processes
            met.links, slow = _judged(times, names)
            met.problems += slow

        # The host that holds the store leaves last.
        exchanged(store, "left", 0, number, hosts if holds else 0)
        return met


def _links(known: Nodes, first: int, processes: int, ranks: int) -> list[Any]:
    """Return, for each process of this host, the seconds of its links, or an error message."""
    command = [sys.executable, "-m", "oneloop.tools.doctor.doctor"]
    command += [known.host, str(known.port), str(ranks)]
    started = [
        subprocess.Popen(
            [*command, str(first + local), str(local)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for local in range(processes)
    ]

    # Each process prints its answer as JSON, or nothing if it was killed.
    found: list[Any] = []
    until = time.monotonic() + _WAIT
    try:
        for process in started:
            printed, _ = process.communicate(timeout=max(0.1, until - time.monotonic()))
            found.append(json.loads(printed or '"it was killed"'))
    except subprocess.TimeoutExpired:
        found += [f"no answer in {_WAIT:.0f} s"] * (processes - len(found))
    finally:
        for process in started:
            process.kill()
    return found


def _judged(times: Sequence[Any], hosts: Sequence[str]) -> tuple[str, list[str]]:
    """Return a line about the links, and their problems.

    ``times`` has for each rank the seconds of its links, or an error message. ``hosts`` has the
    name of its host.
    """
    # A rank without an answer hides all links.
    ranks = len(hosts)
    for rank, why in enumerate(times):
        if isinstance(why, str):
            problem = (
                f"rank {rank} on {hosts[rank]} cannot exchange data with the others: {why}; "
                "open all TCP ports between the hosts, or name the interface (GLOO_SOCKET_IFNAME, "
                "NCCL_SOCKET_IFNAME)"
            )
            return "", [problem]

    # Collect the times by (sender, receiver).
    links: dict[tuple[int, int], float] = {}  # seconds, without those of a rank to itself
    for rank, row in enumerate(times):
        for other, seconds in enumerate(row):
            if seconds:
                links[rank, other] = seconds

    # Report the median, and links that take much longer.
    usual = median(links.values())
    most = max(links.values())
    line = (
        f"links: {ranks} ranks, 1 MiB in {1e3 * usual:.1f} ms (median), at most {1e3 * most:.1f} ms"
    )

    problems = []
    for (rank, other), seconds in links.items():
        if len(links) >= _FEW and seconds > _SLOW * usual:
            problems.append(
                f"the link from rank {rank} on {hosts[rank]} to rank {other} on {hosts[other]} "
                f"takes {seconds / usual:.1f} times the median; check cable, card and switch"
            )
    return line, problems


def _measured(store: TCPStore, ranks: int, rank: int, local: int) -> list[float]:
    """Return the seconds that this rank takes to send 1 MiB to each rank, and to receive as much.

    The number for itself is 0.
    """
    # Connect, and check that a sum is right.
    gpu = devices.kind().type == "cuda"
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        rank=rank,
        world_size=ranks,
        store=PrefixStore("links", store),
        timeout=timedelta(seconds=_WAIT / 2),
    )
    sent = torch.ones(1 << 18, device=f"cuda:{local}" if gpu else "cpu")
    total = sent.clone()
    dist.all_reduce(total)
    if not bool((total == ranks).all()):
        raise RuntimeError("an all-reduce returns a wrong sum")

    # All ranks send at the same time, each one to the rank at this distance.
    found = [0.0] * ranks
    for distance in range(1, ranks):
        to = (rank + distance) % ranks
        sender = (rank - distance) % ranks
        received = torch.empty_like(sent)
        seconds = []
        for _ in range(_TIMES):  # the first one connects
            began = time.perf_counter()
            ends = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, sender)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            received.sum().item()  # host sync: the data has arrived
            seconds.append(time.perf_counter() - began)
        found[to] = min(seconds)
    return found


if __name__ == "__main__":
    die_with(os.getppid())
    try:
        port, *ranks = map(int, sys.argv[2:])
        print(
            json.dumps(_measured(TCPStore(sys.argv[1], port, is_master=False), *ranks)), flush=True
        )
    except (OSError, RuntimeError) as error:
        print(json.dumps(str(error).splitlines()[0]), flush=True)
    os._exit(0)  # without destructors: other ranks may be gone
