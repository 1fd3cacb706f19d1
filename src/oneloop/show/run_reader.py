"""What a run folder tells of its run, finished or not, however long it was and whatever is in its files.

>>> steps, losses = read_record(Path("runs/digits")).curve("train/loss")
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

_STRETCHES = 1024  # of a curve with more points, at least so many stretches are shown by two or three
_LINES = 1 << 16  # that are kept of a run that is followed
EVENTS = 2000  # of a run that has more, some saves are left out
_NOT_FINITE = ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity")
_AT_ONCE = 1 << 25  # bytes of metrics.jsonl that are followed line by line; of a longer file samples are taken


Point = tuple[int, float]  # step and value


class Curve:
    """One metric over the steps. Of many points those that matter are kept: of each stretch of the run the lowest, the
    highest and the first that is not finite; the first of all and the last."""

    __slots__ = ("_first", "_pending", "_stretches", "_width")

    def __init__(self) -> None:
        self._first: Point | None = None
        self._stretches: list[list[Point]] = []
        self._pending: list[Point] = []
        self._width = 1  # points of a stretch

    def add(self, step: int, value: float) -> None:
        self._pending.append((step, value))
        if len(self._pending) >= self._width:
            self._end_stretch()

    def _end_stretch(self) -> None:
        if self._first is None:
            self._first = self._pending[0]
        self._stretches.append(_telling(self._pending))
        self._pending = []
        if len(self._stretches) >= 2 * _STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [_telling(one + other) for one, other in pairs]
            self._width *= 2

    def points(self) -> tuple[list[int], list[float]]:
        """Steps and values."""
        end = self._pending and [*_telling(self._pending), self._pending[-1]]
        kept = [point for stretch in (*self._stretches, end) for point in stretch]
        if self._first is not None:
            kept = [self._first, *kept]
        kept = [point for place, point in enumerate(kept) if not place or point is not kept[place - 1]]
        return [step for step, _ in kept], [value for _, value in kept]


def _telling(points: list[Point]) -> list[Point]:
    """The lowest, the highest and the first that is not finite, in their order."""
    if len(points) < 3:
        return points
    values = [value for _, value in points]
    low, high = min(values), max(values)
    if low - low == 0 == high - high and sum(values) - sum(values) == 0:  # all are finite
        places = {values.index(low), values.index(high)}
    else:
        finite = [place for place, value in enumerate(values) if math.isfinite(value)]
        places = {next(place for place, value in enumerate(values) if not math.isfinite(value))}
        places |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
    return [points[place] for place in sorted(places)]


@dataclass
class Record:
    """What was written down of a run."""

    name: str
    curves: dict[str, dict[str, Curve]] = field(default_factory=lambda: defaultdict(dict))
    """by metric, and by the weights that were evaluated (empty: a metric of training)"""
    happened: list[dict[str, Any]] = field(default_factory=list)  # events; of very many saves only some
    last: int | None = None  # step of the last line
    summary: dict[str, Any] = field(default_factory=dict)  # empty while it is not finished, as all that is missing
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, Any] = field(default_factory=dict)

    def take(self, line: dict[str, Any]) -> None:
        """Takes in one line of metrics.jsonl."""
        step = self.last = line["step"]
        if "event" in line:
            self.happened.append(line)
            if len(self.happened) > 2 * EVENTS:
                self._thin_events()
            return
        weights = line.get("weights", "")
        for name, value in line.items():
            if "/" in name:
                if type(value) is not float:
                    if type(value) is not int and value not in _NOT_FINITE:
                        continue
                    value = number(value)
                of = self.curves[name]
                if weights not in of:
                    of[weights] = Curve()
                of[weights].add(step, value)

    def _thin_events(self) -> None:
        """Every second save goes; where there are few, of all others those in the middle."""
        events = [event for place, event in enumerate(self.happened) if event["event"] != "save" or place % 2]
        self.happened = events if len(events) <= EVENTS else [*events[: EVENTS // 2], *events[-EVENTS // 2 :]]

    def curve(self, metric: str, weights: str | None = None) -> tuple[list[int], list[float]]:
        """Steps and values of one metric; of an evaluation, with these weights."""
        of = self.curves.get(metric, {})
        chosen = list(of.values()) if weights is None else [of[weights]] if weights in of else []
        if len(chosen) == 1:
            return chosen[0].points()
        points = [point for one in chosen for point in zip(*one.points(), strict=True)]
        points.sort(key=lambda point: point[0])
        return [step for step, _ in points], [value for _, value in points]

    def metrics(self) -> list[str]:
        """Names of all metrics, in the order of their appearance."""
        return list(self.curves)

    def weights(self) -> list[str]:
        """What was evaluated: raw, and the averages by name."""
        return list(dict.fromkeys(weights for of in self.curves.values() for weights in of if weights))

    def events(self) -> list[dict[str, Any]]:
        """Saves, resumes and bad steps."""
        return self.happened


def number(value: Any) -> float:
    """A metric as a number; NaN where it is none. (NaN and Inf are written as text.)"""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else math.nan


def read_record(folder: Path) -> Record:
    """Read a run folder, in memory that does not grow with the run. Raise ValueError if it has no metrics.jsonl."""

    def content(name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        try:
            found = parse((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    files: Any = {name: content(f"{name}.json", json.loads) for name in ("summary", "environment", "examples")}
    record = Record(folder.resolve().name, recipe=content("recipe.yaml", yaml.safe_load), **files)
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            for line in parsed(file):
                record.take(line)
    except OSError as error:
        raise ValueError(f"{folder} holds no run (metrics.jsonl: {error.strerror})") from error
    return record


def parsed(lines: Any) -> Iterator[dict[str, Any]]:
    """The whole lines of metrics.jsonl; one that is being written, or is damaged, is left out."""
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict) and type(content.get("step")) is int and 0 <= content["step"] < 1 << 53:
            if not isinstance(content.get("event", ""), str) or not isinstance(content.get("weights", ""), str):
                continue
            yield content


def distinct(records: list[Record]) -> list[Record]:
    """Runs of one name get a number."""
    names = [record.name for record in records]
    return [
        replace(record, name=f"{record.name} [{number}]") if names.count(record.name) > 1 else record
        for number, record in enumerate(records, 1)
    ]


class Follower:
    """The lines of a run that may go on: each :meth:`read` reads what is new, or all where the file was cut back.

    Of a long file the first look takes samples, spread over it, and its end.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.sampled = False  # whether there are more lines than these
        self._file = folder / "metrics.jsonl"
        self._read = 0
        self._tail = b""

    def read(self) -> bool:
        """Whether there is anything by now."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read - len(self._tail))
                if file.read(len(self._tail)) != self._tail:  # a resume has cut the file back
                    file.seek(0)
                    self.lines, self._read, self._tail, self.sampled = [], 0, b"", False
                size = file.seek(0, 2)
                if size - self._read > _AT_ONCE:
                    self._sample(file, size)
                file.seek(self._read)
                new = file.read()
        except OSError:
            return bool(self.lines)
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._tail = (self._tail + whole)[-256:]
        self.lines += parsed(whole.splitlines())
        if len(self.lines) > _LINES:  # of a long look every second line, but for the newest
            self.lines, self.sampled = self.lines[:-1000:2] + self.lines[-1000:], True
        return bool(self.lines)

    def _sample(self, file: Any, size: int) -> None:
        """Some lines at a hundred places of what was not read yet, up to a megabyte before its end."""
        end = size - (1 << 20)
        for part in range(100):
            file.seek(self._read + part * (end - self._read) // 100)
            block = file.read(1 << 14)
            if part:
                block = block[block.find(b"\n") + 1 :]
            self.lines += parsed(block[: block.rfind(b"\n") + 1].splitlines())
        file.seek(end)
        self._read = end + len(file.readline())
        self._tail, self.sampled = b"", True

    @property
    def ended(self) -> bool:
        """Whether the run has written its summary."""
        return (self.folder / "summary.json").exists()

    @property
    def age(self) -> float:
        """Seconds since the last line."""
        try:
            return time.time() - self._file.stat().st_mtime
        except OSError:
            return 0.0
