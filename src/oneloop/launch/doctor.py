"""``oneloop doctor``: check that this host can train, and that several hosts can train together."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from oneloop.basics.command_options import Options
from oneloop.basics.files import dumps, printable
from oneloop.basics.launcher import die_with, on_stops
from oneloop.launch.before_imports import read_once
from oneloop.launch.command import accelerate_variables, launch_options
from oneloop.launch.elastic import exchanged, open_store
from oneloop.launch.node_checks import about, compared, facts, foreign_folder, local_problems
from oneloop.launch.nodes import Nodes, address_towards, nodes, options

_WAIT = 60.0  # seconds to wait for the other hosts, and for all links
# tries of a link; of this many links, one with this many times the median is slow
_TIMES, _FEW, _SLOW = 4, 4, 3.0


def main(words: Sequence[str]) -> int:
    """Check that this host can train, and that several hosts can train together.

      oneloop doctor --nodes 2 --rendezvous HOST:PORT --config_file fsdp2 gpt --run.dir /shared/gpt

    Takes the words of `oneloop launch`; the recipe may be missing. Start it on all hosts, as you
    would start a run. Checks devices, limits, disk and caches of each host; then versions,
    settings, clocks and run folder of all hosts, and each link between their processes. The exit
    code is 1 if there is a problem."""
    as_json, words = "--json" in words, [word for word in words if word != "--json"]
    if words[:1] in (["-h"], ["--help"]):
        Options(
            "doctor", main.__doc__, usage="oneloop doctor [--json] [OPTIONS] [RECIPE --key value …]"
        ).print_help()
        return 0
    own, rest = options([*words, "no-recipe"])  # the last word stands for a missing recipe
    given, _, found = launch_options(rest)
    known = replace(nodes(own, os.environ) or found or Nodes(1, 1, "127.0.0.1"), rejoin=_WAIT)
    if not any(option.startswith("--config") for option in given):
        rest = [
            "--config_file",
            "ddp" if known.most > 1 or torch.accelerator.device_count() > 1 else "single",
            *rest,
        ]
    variables, training, processes = accelerate_variables(rest, known)
    os.environ |= variables
    recipe = read_once(tuple(training[:-1])) if training[:-1] else None
    # a mirror needs no shared one
    folder = recipe.folder if recipe is not None and recipe.mirror is None else None
    mine: dict[str, Any] = {"name": socket.gethostname(), "about": about()}
    mine["problems"] = [*local_problems(folder or Path("runs"))]
    every, shared, links = [mine], list[str](), ""
    on_stops(lambda number, _: sys.exit(128 + number))
    try:
        every, shared, links = _together(known, mine, processes, folder)
    except (OSError, RuntimeError) as error:  # errors of torch's stores are RuntimeErrors
        why, place = str(error).splitlines()[0], f"{known.host}:{known.port}"
        lost = f"the rendezvous at {place} does not answer ({why}); check the address and its host"
        shared = [why if isinstance(error, ConnectionError) else lost]
    shown = every if every[0] is mine else [mine]  # the first host prints the problems of all
    problems = [
        *(f"{host['name']}: {problem}" for host in shown for problem in host["problems"]),
        *shared,
    ]
    failed = bool(shared or any(host["problems"] for host in every))
    lines = [
        f"{mine['name']}: {mine['about']}",
        *filter(None, [links]),
        *(f"problem: {text}" for text in problems),
    ]
    lines += [f"problems: {len(problems) or 'see ' + every[0]['name']}" if failed else "no problem"]
    content = {"host": mine["name"], "about": mine["about"], "links": links, "problems": problems}
    print(dumps(content) if as_json else printable("\n".join(lines)))
    return int(failed)


def _together(
    known: Nodes, mine: Any, processes: int, folder: Path | None
) -> tuple[list[Any], list[str], str]:
    """Return the facts of all hosts, the problems between them, and a line about links. Raise
    OSError, RuntimeError."""
    if known.most == 1:
        store, holds, address = TCPStore("127.0.0.1", 0, is_master=True), True, "127.0.0.1"
        known = replace(known, host=address, port=store.port)
    else:
        address = address_towards(known.host, known.port)
        mine["name"] += f" ({address})"
        store, holds = open_store(known)
    number, hosts = store.add("joined", 1) - 1, known.least
    if number >= hosts:
        return (
            [mine],
            [f"{hosts} hosts came before this one; start {hosts} hosts, or raise --nodes"],
            "",
        )
    mine |= facts(mine["name"], address, processes, folder, first=number == 0)
    try:
        every = exchanged(store, "facts", mine, number, hosts, _WAIT)
        every[number] = mine
        seen = exchanged(store, "seen", foreign_folder(mine["name"], every[0]), number, hosts)
        shared, line = [*compared(every), *filter(None, seen)], ""
        ranks, same = hosts * processes, len({host["processes"] for host in every}) == 1
        if ranks > 1 and same and not any(host["loopback"] for host in every):
            links = _links(known, number * processes, processes, ranks)
            times = exchanged(store, "links", links, number, hosts, _WAIT + 15)
            names = [host["name"] for host in every for _ in range(processes)]
            line, *slow = _judged([rank for host in times for rank in host], names)
            shared += slow
        exchanged(store, "left", 0, number, hosts if holds else 0)
        return every, shared, line
    finally:
        if "file" in mine:
            Path(mine["file"]).unlink(missing_ok=True)


def _links(known: Nodes, first: int, processes: int, ranks: int) -> list[Any]:
    """Return, for each process of this host, the seconds of its links, or an error message."""
    command = [
        sys.executable,
        "-m",
        "oneloop.launch.doctor",
        known.host,
        str(known.port),
        str(ranks),
    ]
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen([*command, str(first + local), str(local)], **how)
        for local in range(processes)
    ]
    found, until = list[Any](), time.monotonic() + _WAIT
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


def _judged(times: Sequence[Any], hosts: Sequence[str]) -> Iterator[str]:
    """Yield a line about the links, whose seconds each rank has measured, then the problems."""
    ranks = len(hosts)
    for rank, why in enumerate(times):
        if isinstance(why, str):
            how = (
                "open all TCP ports between the hosts, or name the interface (GLOO_SOCKET_IFNAME, "
                "NCCL_SOCKET_IFNAME)"
            )
            yield from (
                "",
                f"rank {rank} on {hosts[rank]} cannot exchange data with the others: {why}; {how}",
            )
            return
    links = {
        (rank, other): seconds
        for rank, row in enumerate(times)
        for other, seconds in enumerate(row)
        if seconds
    }
    usual, most = median(links.values()), max(links.values())
    yield (
        f"links: {ranks} ranks, 1 MiB in {1e3 * usual:.1f} ms (median), at most {1e3 * most:.1f} ms"
    )
    for (rank, other), seconds in links.items():
        if len(links) >= _FEW and seconds > _SLOW * usual:
            names = f"rank {rank} on {hosts[rank]} to rank {other} on {hosts[other]}"
            yield (
                f"the link from {names} takes {seconds / usual:.1f} times the median; check cable, "
                "card and switch"
            )


def _measured(store: TCPStore, ranks: int, rank: int, local: int) -> list[float]:
    """Return the seconds that this rank takes to send 1 MiB to each rank, while it receives as
    much; 0 for itself."""
    gpu = torch.cuda.is_available()
    how: dict[str, Any] = {
        "store": PrefixStore("links", store),
        "timeout": timedelta(seconds=_WAIT / 2),
    }
    dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=ranks, **how)
    sent = torch.ones(1 << 18, device=f"cuda:{local}" if gpu else "cpu")
    dist.all_reduce(total := sent.clone())
    if not bool((total == ranks).all()):
        raise RuntimeError("an all-reduce returns a wrong sum")
    found = [0.0] * ranks
    for distance in range(1, ranks):
        seconds, got = [], torch.empty_like(sent)
        for _ in range(_TIMES):  # the first one connects
            began, to, sender = (
                time.perf_counter(),
                (rank + distance) % ranks,
                (rank - distance) % ranks,
            )
            ends = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, got, sender)]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            got.sum().item()
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
