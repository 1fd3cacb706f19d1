"""Read a run folder of a finished or unfinished run, even if its files are damaged.

The memory is bounded.

>>> steps, losses = read_record(Path("runs/digits")).curve("train/loss")
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import flattened, printable
from oneloop.basics.untrusted import MOST_BYTES, opened, parsed_yaml, read_bytes, read_json
from oneloop.show.metrics_file import parsed

_LOG = "metrics.jsonl"
_STRETCHES = 1024  # a longer curve has at least this many stretches of two or three points each
_MOST_YAML = 1 << 20  # bytes of a YAML file
_LINES = 1 << 16  # lines kept of a followed run
EVENTS = 2000  # events kept of a run; some saves are dropped above it
_NOT_FINITE = ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity")
_AT_ONCE = 1 << 25  # bytes of metrics.jsonl; more new content is only sampled

Point = tuple[int, float]  # step and value


class Curve:
    """One metric over the steps, in bounded memory.

    Of many points, each stretch of the run keeps its lowest, its highest and its first non-finite
    one; the first and last point of the run stay.
    """

    # It thins out the points of one metric. A Record has many of them.
    __slots__ = ("_first", "_pending", "_stretches", "_width")

    def __init__(self) -> None:
        self._first: Point | None = None
        self._stretches: list[list[Point]] = []
        self._pending: list[Point] = []
        self._width = 1  # points per stretch

    def add(self, step: int, value: float) -> None:
        """Add a point; steps ascend."""
        self._pending.append((step, value))
        if len(self._pending) >= self._width:
            self._end_stretch()

    def _end_stretch(self) -> None:
        if self._first is None:
            self._first = self._pending[0]
        self._stretches.append(_extremes(self._pending))
        self._pending = []

        # Join pairs of stretches when there are too many.
        if len(self._stretches) >= 2 * _STRETCHES:
            pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
            self._stretches = [_extremes(one + other) for one, other in pairs]
            self._width *= 2

    @property
    def last(self) -> float:
        """Return the newest value; 0 without points."""
        newest = self._pending or (self._stretches[-1] if self._stretches else [(0, 0.0)])
        return newest[-1][1]

    def __bool__(self) -> bool:
        return self._first is not None or bool(self._pending)

    def points(self) -> tuple[list[int], list[float]]:
        """Return steps and values."""
        kept: list[Point] = []
        if self._first is not None:
            kept.append(self._first)
        for stretch in self._stretches:
            kept += stretch
        if self._pending:
            kept += [*_extremes(self._pending), self._pending[-1]]

        # The first and the last point may also be an extreme of their stretch.
        steps: list[int] = []
        values: list[float] = []
        before: Point | None = None
        for point in kept:
            if point is not before:
                steps.append(point[0])
                values.append(point[1])
            before = point
        return steps, values


def _extremes(points: list[Point]) -> list[Point]:
    """Return the lowest, the highest and the first non-finite point, in order of steps."""
    if len(points) < 3:
        return points
    values = [value for _, value in points]
    low, high = min(values), max(values)
    # x - x is 0 only if x is finite, and a sum is finite only if all its terms are.
    if low - low == 0 == high - high and sum(values) - sum(values) == 0:
        indices = {values.index(low), values.index(high)}
    else:
        finite = [index for index, value in enumerate(values) if math.isfinite(value)]
        indices = {next(index for index, value in enumerate(values) if not math.isfinite(value))}
        if finite:
            indices.add(min(finite, key=values.__getitem__))
            indices.add(max(finite, key=values.__getitem__))
    return [points[index] for index in sorted(indices)]


@dataclass
class Record:
    """The recorded content of a run folder."""

    # It reads a whole run once, for the report. Follower reads a growing run again and again, and
    # Lines (metrics_file.py) is the training process's own view, which also writes and repairs.
    name: str

    # by metric, and by the evaluated weights (empty: a training metric)
    curves: dict[str, dict[str, Curve]] = field(default_factory=lambda: defaultdict(dict))

    # samples trained on and seconds, at the steps of log lines
    along: dict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))

    # seconds by phase of the clock (share/… of the time since the line before)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    time: float = 0.0  # seconds of training at the last log line

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
        seconds = 0.0  # since the log line before
        if "time" in line:
            for axis in ("samples", "time"):
                value = number(line.get(axis))
                if math.isfinite(value):
                    self.along[axis].add(step, value)
            seconds = max(0.0, self.along["time"].last - self.time)
            self.time = self.along["time"].last
        for name, value in line.items():
            if "/" not in name:
                continue
            if type(value) is not float:  # the usual case, so it is checked first
                if type(value) is not int and value not in _NOT_FINITE:
                    continue
                value = number(value)
            of = self.curves[name]
            if weights not in of:
                of[weights] = Curve()
            of[weights].add(step, value)
            if name.startswith("share/") and math.isfinite(value):
                self.spent[name.removeprefix("share/")] += value * seconds

    def _thin_events(self) -> None:
        """Drop every second save; if too many events remain, also drop those in the middle."""
        events = []
        for index, event in enumerate(self.event_lines):
            if event["event"] != "save" or index % 2:
                events.append(event)
        if len(events) > EVENTS:
            events = [*events[: EVENTS // 2], *events[-EVENTS // 2 :]]
        self.event_lines = events

    def curve(self, metric: str, weights: str | None = None) -> tuple[list[int], list[float]]:
        """Return steps and values of one metric.

        Args:
            metric: its name.
            weights: the evaluated weights; None: the curves of all weights, in order of steps.
        """
        of = self.curves.get(metric, {})
        if weights is None:
            chosen = list(of.values())
        else:
            chosen = [of[weights]] if weights in of else []
        if len(chosen) == 1:
            return chosen[0].points()
        points: list[Point] = []
        for one in chosen:
            points += zip(*one.points(), strict=True)
        points.sort(key=lambda point: point[0])
        return [step for step, _ in points], [value for _, value in points]

    def position(self, axis: str, steps: Sequence[int]) -> list[float]:
        """Return the samples or seconds at steps, interpolated between log lines.

        Args:
            axis: ``samples`` or ``time``.
            steps: the steps.

        Returns:
            A number for each step; nothing if no line has this axis.
        """
        known, values = self.along[axis].points()
        if not known:
            return []
        return np.interp(steps, [0, *known], [0.0, *values]).tolist()

    def metrics(self) -> list[str]:
        """Return the names of all metrics, in order of appearance."""
        return list(self.curves)

    def weights(self) -> list[str]:
        """Return the names of the evaluated weights: raw, and the EMAs."""
        names: dict[str, None] = {}
        for of in self.curves.values():
            names.update(dict.fromkeys(filter(None, of)))
        return list(names)

    def events(self) -> list[dict[str, Any]]:
        """Return the events: saves, resumes and bad steps."""
        return self.event_lines


def entries(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping; else an empty one, because files may be damaged."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float:
    """Convert a logged metric to a float; NaN if it is not a number.

    NaN and Inf are logged as text.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    return math.nan


def log_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, with bounded memory.

    Raises:
        BadInput: the folder has none, it is not a regular file, or a line is damaged.
    """
    file = folder / _LOG
    try:
        with opened(file) as stream:
            yield from parsed(iter(partial(stream.readline, MOST_BYTES), b""), of=file)
    except OSError as error:
        raise BadInput(f"{folder} holds no run ({_LOG}: {error.strerror})") from error


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the dictionary in a small YAML file.

    Raises:
        ValueError: it is not YAML, not a dictionary, or too large.
        OSError: it cannot be read.
    """
    content = parsed_yaml(read_bytes(file, _MOST_YAML).decode())
    if not isinstance(content, dict):
        raise ValueError(f"expected a dict, found {content!r:.60}")
    return content


def content_of(file: Path, read: Callable[[Path], dict[str, Any]] = read_json) -> dict[str, Any]:
    """Return what a file of a run folder holds; empty if it is missing or damaged."""
    try:
        return read(file)
    except (OSError, ValueError):
        return {}


def read_record(folder: Path) -> Record:
    """Read a run folder, in memory that does not grow with the run.

    Raises:
        BadInput: as :func:`log_lines`.
    """
    # Only metrics.jsonl must exist: a run in progress lacks other files.
    record = Record(
        name=folder.resolve().name,
        summary=content_of(folder / "summary.json"),
        recipe=content_of(folder / "recipe.yaml", read_yaml),
        environment=content_of(folder / "environment.json"),
        examples=content_of(folder / "examples.json"),
    )
    # Time before the first start of this folder belongs to a run in another folder.
    before = number(entries(record.environment.get("starts")).get("before"))
    record.time = before if math.isfinite(before) else 0.0
    for line in log_lines(folder):
        record.take(line)
    return record


def distinct(records: list[Record]) -> list[Record]:
    """Append a number to the names of runs that have the same name."""
    names = [record.name for record in records]
    renamed = []
    for number, record in enumerate(records, 1):
        if names.count(record.name) > 1:
            record = replace(record, name=f"{record.name} [{number}]")
        renamed.append(record)
    return renamed


def differences(records: Sequence[Record]) -> list[tuple[Any, ...]]:
    """Return the keys that differ between the recipes of runs, each with its values.

    ``run.dir`` is left out.
    """
    flat = [flattened(record.recipe) for record in records]
    keys = dict.fromkeys(key for recipe in flat for key in recipe if key != "run.dir")
    rows: list[tuple[Any, ...]] = []
    for key in keys:
        values = [recipe.get(key) for recipe in flat]
        if len(set(map(str, values))) > 1:
            rows.append((key, *values))
    return rows


class Follower:
    """The lines of a run in progress.

    Each :meth:`read` reads new lines, or all if the file was truncated. The first read of a long
    file takes samples that are spread over it, and its end.
    """

    # It keeps lines, and not curves as a Record does: a chart in the terminal shows the newest.
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
        self.sampled = False  # whether there are more lines than these
        self._file = folder / _LOG
        self._read = 0  # bytes
        self._tail = b""  # the last bytes that were read

    def read(self) -> bool:
        """Read new lines; return whether there are any lines yet. Raise BadInput for damage."""
        try:
            with opened(self._file) as file:
                file.seek(self._read - len(self._tail))
                if file.read(len(self._tail)) != self._tail:  # a resume has truncated the file
                    file.seek(0)
                    self.lines = []
                    self.sampled = False
                    self._read = 0
                    self._tail = b""
                size = file.seek(0, 2)
                if size - self._read > _AT_ONCE:
                    self._sample(file, size)
                file.seek(self._read)
                new = file.read()
        except OSError:
            return bool(self.lines)

        # Leave an incomplete last line to the next read.
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._tail = (self._tail + whole)[-256:]
        self.lines += parsed(whole.splitlines(keepends=True), of=self._file)
        if len(self.lines) > _LINES:  # drop every second line, except the newest
            self.lines = self.lines[:-1000:2] + self.lines[-1000:]
            self.sampled = True
        return bool(self.lines)

    def _sample(self, file: Any, size: int) -> None:
        """Read some lines at a hundred positions of the unread part.

        The last megabyte is left to the caller.
        """
        end = size - (1 << 20)
        for part in range(100):
            file.seek(self._read + part * (end - self._read) // 100)
            block = file.read(1 << 14)
            if part:
                block = block[block.find(b"\n") + 1 :]
            complete = block[: block.rfind(b"\n") + 1].splitlines(keepends=True)
            self.lines += parsed(complete, of=self._file)
        file.seek(end)
        self._read = end + len(file.readline())
        self._tail = b""
        self.sampled = True

    @property
    def has_metrics(self) -> bool:
        """Return whether a line with metrics was read."""
        return any("/" in name for line in self.lines for name in line)

    @property
    def exit_reason(self) -> str:
        """Return why the run has ended; empty while it trains."""
        return printable(content_of(self.folder / "summary.json").get("exit_reason", ""))

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
