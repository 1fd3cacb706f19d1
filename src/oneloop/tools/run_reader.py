"""Read a run folder of a finished or unfinished run, even if its files are damaged.

The memory is bounded.

>>> steps, losses = read_record(Path("runs/digits")).curve("train/loss")
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import flattened
from oneloop.basics.untrusted import MOST_BYTES, opened, parsed_yaml, read_bytes, read_json
from oneloop.show.metrics_file import parsed

LOG = "metrics.jsonl"
_STRETCHES = 1024  # of a long curve, with two or three points each
_MOST_POINTS = 4 * _STRETCHES  # of a curve
_MOST_YAML = 1 << 20  # bytes of a YAML file
_EVENTS = 2000  # newest events kept of a run
_NUMBERS = (float, int)
_NOT_FINITE = ("nan", "inf", "-inf", "NaN", "Infinity", "-Infinity")

Point = tuple[int, float]  # step and value
_STEP, _VALUE = itemgetter(0), itemgetter(1)


class Curve:
    """One metric over the steps, in bounded memory.

    Of many points, each of many equal stretches of the run keeps its lowest, its highest and its
    first non-finite one; the first and last point of the run stay.
    """

    # A Record has many of them.
    __slots__ = ("points",)

    def __init__(self) -> None:
        self.points: list[Point] = []

    def add(self, step: int, value: float) -> None:
        """Add a point; steps ascend."""
        points = self.points
        points.append((step, value))
        if len(points) < _MOST_POINTS:
            return

        # Thin them out. A damaged log may repeat steps, or go back.
        last = max(points)[0]
        stretches = defaultdict[int, list[Point]](list)
        for point in points[1:-1]:
            stretches[point[0] * _STRETCHES // (last + 1)].append(point)
        self.points = points[:1]
        for stretch in stretches.values():
            finite = [point for point in stretch if math.isfinite(point[1])]
            kept = [point for point in stretch if not math.isfinite(point[1])][:1]
            if finite:
                kept += [min(finite, key=_VALUE), max(finite, key=_VALUE)]
            self.points += sorted(set(kept), key=_STEP)
        self.points.append(points[-1])


@dataclass
class Record:
    """The recorded content of a run folder."""

    # Lines (metrics_file.py) is the training process's own view, which also writes and repairs.
    name: str
    folder: Path = Path()

    # by metric, and by the evaluated weights (empty: a training metric)
    curves: dict[str, dict[str, Curve]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Curve))
    )

    # samples trained on and seconds, at the steps of log lines
    along: dict[str, Curve] = field(default_factory=lambda: defaultdict(Curve))

    # seconds by phase of the clock (share/… of the time since the line before)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    time: float = 0.0  # seconds of training at the last log line

    # the newest events: saves, resumes and bad steps; and how many of each kind there were
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_EVENTS))
    event_counts: Counter[str] = field(default_factory=Counter)
    last: int | None = None  # step of the last line
    summary: dict[str, Any] = field(default_factory=dict)  # empty until the run has finished
    recipe: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, Any] = field(default_factory=dict)

    def take(self, line: dict[str, Any]) -> None:
        """Add one line of metrics.jsonl."""
        step = self.last = line["step"]
        if "event" in line:
            self.events.append(line)
            self.event_counts[str(line["event"])] += 1
            return
        weights = line.get("weights", "")
        now = number(line.get("time", self.time))
        seconds = max(0.0, now - self.time)  # since the log line before; 0 if it is not a number
        if "time" in line:
            for axis in ("samples", "time"):
                value = number(line.get(axis))
                if math.isfinite(value):
                    self.along[axis].add(step, value)
        if math.isfinite(now):
            self.time = now
        for name, value in line.items():
            if "/" not in name or (type(value) not in _NUMBERS and value not in _NOT_FINITE):
                continue
            value = number(value)
            self.curves[name][weights].add(step, value)
            if name.startswith("share/") and math.isfinite(value):
                self.spent[name.removeprefix("share/")] += value * seconds

    def points(self, metric: str, weights: str | None = None) -> list[Point]:
        """Return the points of one metric.

        Args:
            metric: its name.
            weights: the evaluated weights; None: the curves of all weights, in order of steps.
        """
        points: list[Point] = []
        for name, curve in self.curves.get(metric, {}).items():
            if weights in (None, name):
                points += curve.points
        return sorted(points, key=_STEP)

    def curve(self, metric: str, weights: str | None = None) -> tuple[list[int], list[float]]:
        """Return steps and values of :meth:`points`."""
        points = self.points(metric, weights)
        return [step for step, _ in points], [value for _, value in points]

    def position(self, axis: str, steps: Sequence[int]) -> list[float]:
        """Return the samples or seconds at steps, interpolated between log lines.

        Args:
            axis: ``samples`` or ``time``.
            steps: the steps.

        Returns:
            A number for each step; nothing if no line has this axis.
        """
        points = self.along[axis].points
        if not points:
            return []
        known, values = zip((0, 0.0), *points, strict=True)
        return [float(value) for value in np.interp(steps, known, values)]

    @property
    def done(self) -> bool:
        """Return whether the run has ended and cannot continue."""
        return str(self.summary.get("exit_reason")).startswith(("done", "early stop"))

    def weights(self) -> list[str]:
        """Return the names of the evaluated weights: raw, and the EMAs."""
        names: dict[str, None] = {}
        for of in self.curves.values():
            names.update(dict.fromkeys(filter(None, of)))
        return list(names)


def entries(value: Any) -> Mapping[str, Any]:
    """Return the value if it is a mapping; else an empty one, because files may be damaged."""
    return value if isinstance(value, Mapping) else {}


def number(value: Any) -> float:
    """Convert a logged metric to a float; NaN if it is not a number.

    NaN and Inf are logged as text.
    """
    if type(value) not in _NUMBERS and value not in _NOT_FINITE:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def log_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's metrics.jsonl, with bounded memory.

    Raises:
        BadInput: the folder has none, it is not a regular file, or a line is damaged.
    """
    file = folder / LOG
    try:
        with opened(file) as stream:
            yield from parsed(iter(partial(stream.readline, MOST_BYTES), b""), of=file)
    except OSError as error:
        raise BadInput(f"{folder} holds no run ({LOG}: {error.strerror})") from error


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
        folder=folder,
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
