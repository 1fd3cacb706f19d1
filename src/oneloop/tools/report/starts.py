"""The times of all starts of a run, from which the report computes goodput."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from oneloop.basics.exit_codes import STOPPED
from oneloop.basics.untrusted import read_json
from oneloop.run.folder import Folder, read_vouched
from oneloop.show.metrics_file import parsed

_TAIL = 1 << 16  # bytes of metrics.jsonl that hold the last log line


def starts(folder: Folder, began: float, seconds: float) -> dict[str, float]:
    """Return the times of all starts.

    Args:
        folder: the run folder, with the files of the earlier start.
        began: time of this start, in seconds since 1970.
        seconds: training time of the checkpoint that it continues from (0: there is none).

    Returns:
        ``first``: time of the first start. ``number``: of starts. ``repeated``: seconds of
        training that were lost and are done again. ``before``: training time before the first
        start, in another folder. ``stops``: starts that ended by a requested stop.
    """
    new = {
        "first": began,
        "number": 1,
        "repeated": 0.0,
        "before": seconds,
        "stops": 0,
    }
    old = folder.read("environment.json", partial(_starts, like=new))
    if not old:
        return new

    # What was trained after the checkpoint is lost: the last log line says until when.
    file = folder.path / "metrics.jsonl"
    if file.is_file():
        with suppress(OSError):
            lost = _last_time(file) - max(seconds, old["before"])
            old["repeated"] += max(0.0, lost)

    # Did the last start end by a requested stop?
    ended = folder.read("summary.json", read_vouched)
    if ended and ended.get("exit_code") == STOPPED:
        old["stops"] += 1
    old["number"] += 1
    old["before"] = min(old["before"], seconds)
    return old


def _last_time(file: Path) -> float:
    """Return the training time of the last log line of metrics.jsonl; 0 if there is none."""
    with file.open("rb") as lines:
        size = lines.seek(0, os.SEEK_END)
        lines.seek(max(0, size - _TAIL))
        times = [0.0]
        for line in parsed(lines):
            if isinstance(line.get("time"), int | float):
                times.append(line["time"])
    return max(times)


def _starts(file: Path, *, like: Mapping[str, float]) -> dict[str, float]:
    """Return the times of the starts in environment.json, with the types of others."""
    starts = read_json(file).get("starts", {})
    if not starts:
        return {}
    return {name: type(value)(starts[name]) for name, value in like.items()}
