"""Who stands still: a verdict from what every process of a run tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oneloop.basics.beats import ENDING, SAVING

_TOLD = 10.0
"""seconds without a sign of life that a process has which was told to stop, where nothing is known of its steps"""
_SILENT = 5.0
"""seconds without a report, from which on a process is called silent"""


@dataclass
class Standing:
    """How one process gets on."""

    rank: int
    phase: str = "set-up"
    count: int = 0
    """signs of life so far"""
    since: float = 0.0
    """seconds since the last one"""
    limit: float = float("inf")
    """seconds that are usual, and as long as it is waited beyond"""
    median: float | None = None
    waits: bool = False
    """for other processes"""
    where: str = ""
    patience: float = 1.0
    """factor of all limits"""
    unit: str = ""
    """number and name of the FSDP2 unit that ran last in this step"""
    held: bool = False
    """by a person: not to be judged"""
    silent: float = 0.0
    """seconds since the last report"""
    stopped: bool = False
    """by SIGSTOP"""
    told: bool = False
    """to stop"""

    def late(self, told: bool) -> bool:
        limit = self.limit
        if told and self.median is None and self.phase not in (SAVING, ENDING):
            limit = min(limit, self.patience * _TOLD)
        return not self.held and self.since > limit


def culprits(standings: Sequence[Standing]) -> list[Standing]:
    """Those that stand still, and for whom all others wait; empty where any process gets on, or may yet.

    First those that do not even report, then those that do not wait for others, then those that are furthest behind.
    """
    if not standings or any(one.held for one in standings) or (len(standings) == 1 and standings[0].stopped):
        return []  # a run of one process that a person has stopped goes on when he likes
    told = any(one.told for one in standings)
    if not all(one.late(told) for one in standings):
        return []
    for chosen in ([one for one in standings if one.silent > _SILENT], [one for one in standings if not one.waits]):
        if chosen:
            return chosen
    least = min(one.count for one in standings)
    return [one for one in standings if one.count == least]


def other_units(standings: Sequence[Standing]) -> str:
    """A likely cause if all ranks wait for one another: under FSDP2 they run different units."""
    if len({one.unit for one in standings}) < 2 or not all(one.waits for one in standings):
        return ""
    units = ", ".join(f"rank {one.rank} in unit call {one.unit or 'none'}" for one in standings[:4])
    return f"; all wait, {units}: FSDP2 hangs if which units run, or how often, depends on the samples"


def sentence(standing: Standing) -> str:
    """What is said of one that stands still."""
    usual = f" (a step takes {standing.median:.2g} s)" if standing.median is not None else ""
    if standing.stopped:
        doing = "it is stopped (SIGSTOP)"
    elif standing.silent > _SILENT:
        doing = "it does not answer" + (f", last seen at {standing.where}" if standing.where else "")
    elif standing.where:
        doing = f"{'it waits for others' if standing.waits else 'it is'} at {standing.where}"
    else:
        doing = "nothing more is known"
    return f"rank {standing.rank} stands still in {standing.phase} for {standing.since:.0f} s{usual}: {doing}"
