"""Goodput: which share of the time since the first start of a run was useful."""

from collections.abc import Mapping
from typing import Any

from oneloop.basics.exit_codes import STOPPED

_CAUSES = {
    "start": "starts",
    "repeated": "repeated steps",
    "data": "waiting for data",
    "save": "saving",
}
"""causes of lost time, and how a sentence names them"""


def goodput(
    starts: Mapping[str, float], *, kept: float, now: float, lost: Mapping[str, float]
) -> dict[str, Any]:
    """Return how much of the time since the first start was useful.

    Useful is what went into kept steps and evaluations. Time after the last log line of a killed
    start counts as start.

    Args:
        starts: the times of all starts, by :meth:`oneloop.run.folder.Folder.starts`.
        kept: seconds spent on the run, over all starts.
        now: seconds since 1970.
        lost: seconds of waiting for data and of saving, over all starts.

    Returns:
        For summary.json: ``share``, ``seconds`` (since the first start), ``lost`` (seconds by
        cause), ``stops`` (starts that ended by a requested stop), and ``about`` (a
        sentence).
    """
    repeated = starts["repeated"]
    kept -= starts["before"]
    seconds = max(now - starts["first"], kept + repeated, 1e-9)
    every = {"start": seconds - kept - repeated, "repeated": repeated, **lost}
    share = 1 - sum(every.values()) / seconds

    # Say it in a sentence.
    causes = [f"{value / seconds:.1%} {_CAUSES[cause]}" for cause, value in every.items()]
    about = (
        f"goodput {share:.1%} of {seconds:,.0f} s since the first of {starts['number']} "
        f"starts; lost: {', '.join(causes)}"
    )
    return {
        "share": share,
        "seconds": seconds,
        "lost": every,
        "stops": starts.get("stops", 0),
        "about": about.replace("%", " %"),
    }


def sentence(summary: Mapping[str, Any]) -> str:
    """Return what a summary says about goodput, if a reader should see it; else an empty text.

    One start has nothing to compare. After a requested stop, the time until the next start is not
    lost.

    Args:
        summary: the content of summary.json, also of unknown origin.
    """
    found = summary.get("goodput")
    if not isinstance(found, Mapping) or summary.get("exit_code") == STOPPED:
        return ""
    about = str(found.get("about", ""))
    if " 1 starts" in about or found.get("stops", 0) != 0:
        return ""
    return about
