"""What a run folder tells of its run, finished or not.

>>> steps, losses = read_record(Path("runs/digits")).curve("train/loss")
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Record:
    """What was written down of a run."""

    name: str
    lines: list[dict[str, Any]]
    """of metrics.jsonl"""
    summary: dict[str, Any]
    """empty while it is not finished, as all that is missing"""
    recipe: dict[str, Any]
    environment: dict[str, Any]
    examples: dict[str, Any]

    def curve(self, figure: str, weights: str | None = None) -> tuple[list[int], list[float]]:
        """Steps and values of one figure; of an evaluation, with these weights."""
        points = [
            (line["step"], float(line[figure]))
            for line in self.lines  # NaN and Inf are written as text
            if isinstance(line.get(figure), int | float | str)
            and "event" not in line
            and (weights is None or line.get("weights") == weights)
        ]
        return [step for step, _ in points], [value for _, value in points]

    def figures(self) -> list[str]:
        """Names of all figures, in the order of their appearance."""
        return list(dict.fromkeys(name for line in self.lines for name in line if "/" in name))

    def weights(self) -> list[str]:
        """What was evaluated: raw, and the averages by name."""
        return list(dict.fromkeys(line["weights"] for line in self.lines if "weights" in line))

    def events(self) -> list[dict[str, Any]]:
        """Saves, resumes and bad steps."""
        return [line for line in self.lines if "event" in line]


def read_record(folder: Path) -> Record:
    """Reads a run folder.

    Raises:
        ValueError: it holds no metrics.jsonl.
    """

    def content(name: str) -> dict[str, Any]:
        try:
            text = (folder / name).read_text()
            return dict((json.loads(text) if name.endswith(".json") else yaml.safe_load(text)) or {})
        except (OSError, ValueError, yaml.YAMLError):
            return {}

    try:
        text = (folder / "metrics.jsonl").read_text()
    except OSError as error:
        raise ValueError(f"{folder} holds no run (metrics.jsonl: {error.strerror})") from error
    return Record(
        folder.resolve().name,
        list(parsed(text)),
        content("summary.json"),
        content("recipe.yaml"),
        content("environment.json"),
        content("examples.json"),
    )


def parsed(text: str) -> Iterator[dict[str, Any]]:
    """The whole lines of metrics.jsonl; one that is being written is left out."""
    for line in text.splitlines():
        try:
            content = json.loads(line)
        except ValueError:
            continue
        if isinstance(content, dict) and "step" in content:
            yield content


def distinct(records: list[Record]) -> list[Record]:
    """Runs of one name get a number."""
    names = [record.name for record in records]
    return [
        Record(
            f"{record.name} [{number}]" if names.count(record.name) > 1 else record.name,
            record.lines,
            record.summary,
            record.recipe,
            record.environment,
            record.examples,
        )
        for number, record in enumerate(records, 1)
    ]


class Follower:
    """The lines of a run that may go on: each :meth:`read` reads what is new, or all where the file was cut back.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[dict[str, Any]] = []
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
                    self.lines, self._read, self._tail = [], 0, b""
                new = file.read()
        except OSError:
            return bool(self.lines)
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self._tail = (self._tail + whole)[-256:]
        self.lines += parsed(whole.decode(errors="replace"))
        return bool(self.lines)

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
