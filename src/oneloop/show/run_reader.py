"""Read a run folder: of a finished or unfinished run, in bounded memory, even if its files are
damaged.

>>> steps, losses = read_record(Path("runs/digits")).curve("train/loss")
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from oneloop.basics.files import flattened, printable

_STRETCHES = 1024  # a longer curve has at least this many stretches of two or three points each
_LINES = 1 << 16  # lines kept of a followed run
EVENTS = 2000  # events kept of a run; some saves are dropped above it
_NOT_FINITE = ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity")
_AT_ONCE = 1 << 25  # bytes of metrics.jsonl; more new content is only sampled


Point = tuple[int, float]  # step and value


class Curve:
    """One metric over the steps. Of many points, each stretch of the run keeps its lowest, its
    highest and its first non-finite one; the first and last point of the run stay."""

    __slots__ = ("_first", "_pending", "_stretches", "_width")

    def __init__(self) -> None:
        self._first: Point | None = None
        self._stretches: list[list[Point]] = []
        self._pending: list[Point] = []
        self._width = 1  # points per stretch

    def add(self, step: int, value: float) -> None:
        self._pending.append((step, value))
        if len(self._pending) >= self._width:
            self._end_stretch()

    def _end_stretch(self) -> None:
        if self._first is None:
            self._first = self._pending[0]
        self._stretches.append(_extremes(self._pending))
        self._pending = []
        if len(self._stretches) >= 2 * _STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [_extremes(one + other) for one, other in pairs]
            self._width *= 2

    def points(self) -> tuple[list[int], list[float]]:
        """Return steps and values."""
        end = self._pending and [*_extremes(self._pending), self._pending[-1]]
        kept = [point for stretch in (*self._stretches, end) for point in stretch]
        if self._first is not None:
            kept = [self._first, *kept]
        kept = [
            point for index, point in enumerate(kept) if not index or point is not kept[index - 1]
        ]
        return [step for step, _ in kept], [value for _, value in kept]


def _extremes(points: list[Point]) -> list[Point]:
    """Return the lowest, the highest and the first non-finite point, in order of steps."""
    if len(points) < 3:
        return points
    values = [value for _, value in points]
    low, high = min(values), max(values)
    if low - low == 0 == high - high and sum(values) - sum(values) == 0:  # all are finite
        indices = {values.index(low), values.index(high)}
    else:
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        indices = {next(index for index, value in enumerate(values) if not math.isfinite(value))}
        indices |= (
            {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
            if finite
            else set()
        )
    return [points[index] for index in sorted(indices)]


@dataclass
class Record:
    """The recorded content of a run folder."""

    name: str
    curves: dict[str, dict[str, Curve]] = field(default_factory=lambda: defaultdict(dict))
    """by metric, and by the evaluated weights (empty: a training metric)"""
    # events; many saves are thinned out
    event_lines: list[dict[str, Any]] = field(default_factory=list)
    last: int | None = None  # step of the last line
    summary: dict[str, Any] = field(default_factory=dict)  # empty until the run has finished
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, Any] = field(default_factory=dict)

    def take(self, line: dict[str, Any]) -> None:
        """Add one line of metrics.jsonl."""
        step = self.last = line["step"]
        if "event" in line:
            self.event_lines.append(line)
            if len(self.event_lines) > 2 * EVENTS:
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
        """Drop every second save; if too many events remain, also drop those in the middle."""
        events = [
            event
            for index, event in enumerate(self.event_lines)
            if event["event"] != "save" or index % 2
        ]
        self.event_lines = (
            events if len(events) <= EVENTS else [*events[: EVENTS // 2], *events[-EVENTS // 2 :]]
        )

    def curve(self, metric: str, weights: str | None = None) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric; ``weights`` selects the evaluated weights (None:
        all)."""
        of = self.curves.get(metric, {})
        chosen = list(of.values()) if weights is None else [of[weights]] if weights in of else []
        if len(chosen) == 1:
            return chosen[0].points()
        points = [point for one in chosen for point in zip(*one.points(), strict=True)]
        points.sort(key=lambda point: point[0])
        return [step for step, _ in points], [value for _, value in points]

    def metrics(self) -> list[str]:
        """Return the names of all metrics, in order of appearance."""
        return list(self.curves)

    def weights(self) -> list[str]:
        """Return the names of the evaluated weights: raw, and the EMAs."""
        return list(
            dict.fromkeys(weights for of in self.curves.values() for weights in of if weights)
        )

    def events(self) -> list[dict[str, Any]]:
        """Return the events: saves, resumes and bad steps."""
        return self.event_lines


def number(value: Any) -> float:
    """Convert a logged metric to a float; NaN if it is not a number. (NaN and Inf are logged as
    text.)"""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else math.nan


def read_record(folder: Path) -> Record:
    """Read a run folder, in memory that does not grow with the run. Raise ValueError if it has no
    metrics.jsonl."""

    def content(name: str, parse: Callable[[str], Any]) -> dict[str, Any]:
        try:
            found = parse((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return {}
        return found if isinstance(found, dict) else {}

    files: Any = {
        name: content(f"{name}.json", json.loads) for name in ("summary", "environment", "examples")
    }
    record = Record(folder.resolve().name, recipe=content("recipe.yaml", yaml.safe_load), **files)
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            for line in parsed(file):
                record.take(line)
    except OSError as error:
        raise ValueError(f"{folder} holds no run (metrics.jsonl: {error.strerror})") from error
    return record


def parsed(lines: Any) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of metrics.jsonl; skip incomplete and damaged ones."""
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if (
            isinstance(content, dict)
            and type(content.get("step")) is int
            and 0 <= content["step"] < 1 << 53
        ):
            if not isinstance(content.get("event", ""), str) or not isinstance(
                content.get("weights", ""), str
            ):
                continue
            yield content


def distinct(records: list[Record]) -> list[Record]:
    """Append a number to the names of runs that have the same name."""
    names = [record.name for record in records]
    return [
        replace(record, name=f"{record.name} [{number}]")
        if names.count(record.name) > 1
        else record
        for number, record in enumerate(records, 1)
    ]


def differences(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """Return the keys that differ between the recipes of runs, each with its values; ``run.dir`` is
    left out."""
    flat = [flattened(record.recipe) for record in records]
    keys = dict.fromkeys(key for recipe in flat for key in recipe if key != "run.dir")
    values = [(key, *(recipe.get(key) for recipe in flat)) for key in keys]
    return [row for row in values if len(set(map(str, row[1:]))) > 1]


class Follower:
    """The lines of a run in progress: each :meth:`read` reads new lines, or all if the file was
    truncated.

    The first read of a long file takes samples that are spread over it, and its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.sampled = False  # whether there are more lines than these
        self._file = folder / "metrics.jsonl"
        self._read = 0
        self._tail = b""

    def read(self) -> bool:
        """Read new lines; return whether there are any lines yet."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read - len(self._tail))
                if file.read(len(self._tail)) != self._tail:  # a resume has truncated the file
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
        if len(self.lines) > _LINES:  # drop every second line, except the newest
            self.lines, self.sampled = self.lines[:-1000:2] + self.lines[-1000:], True
        return bool(self.lines)

    def _sample(self, file: Any, size: int) -> None:
        """Read some lines at a hundred positions of the unread part, up to a megabyte before its
        end."""
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
    def exit_reason(self) -> str:
        """Return why the run has ended; empty while it trains."""
        try:
            return printable(
                str(json.loads((self.folder / "summary.json").read_text())["exit_reason"])
            )
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return ""

    @property
    def done(self) -> bool:
        """Return whether the run has ended and cannot continue."""
        return self.exit_reason.startswith(("done", "early stop"))

    @property
    def age(self) -> float:
        """Return the seconds since the last line."""
        try:
            return time.time() - self._file.stat().st_mtime
        except OSError:
            return 0.0
