"""The times of all starts of a run, from which the report computes goodput."""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from oneloop.basics.exit_codes import STOPPED
from oneloop.basics.untrusted import is_number, read_json
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
    new = {"first": began, "number": 1, "repeated": 0.0, "before": seconds, "stops": 0}
    old = folder.read("environment.json", partial(_starts, like=new))
    if not old:
        return new

    # What was trained after the checkpoint is lost: the last log line says until when.
    if (folder.path / "metrics.jsonl").is_file():
        with suppress(OSError), (folder.path / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            times = [line["time"] for line in parsed(file) if is_number(line.get("time"))]
            last = max(times, default=0.0)
            old["repeated"] += max(0.0, last - max(seconds, old["before"]))
    ended = folder.read("summary.json", read_vouched) or {}
    old["stops"] = old.get("stops", 0) + (ended.get("exit_code") == STOPPED)
    return old | {"number": old["number"] + 1, "before": min(old["before"], seconds)}


def _starts(file: Path, *, like: Mapping[str, float]) -> dict[str, float]:
    """Return the times of the starts in environment.json, with the types of others."""
    starts = read_json(file).get("starts", {})
    return {name: type(value)(starts[name]) for name, value in like.items() if starts}
