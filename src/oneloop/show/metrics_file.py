"""metrics.jsonl as a file: lines that are whole or not there, cut back at a resume, and mended where it was damaged.

>>> lines = Lines(Path("metrics.jsonl"))
>>> lines.append({"step": 1, "train/loss": 2.3})
>>> state = lines.state_dict()                  # how far it goes, and what is in it up to there
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_64

from oneloop.basics.files import dumps

_CHUNK = 1 << 22


class Lines:
    """A file of JSON objects, one a line; ``say`` reports damage to it."""

    def __init__(self, path: Path, *, say: Callable[[str], object] = print) -> None:
        self.path, self._say = path, say
        self._good, self._step = 0, 0  # bytes of whole lines, and the step of the last one
        self._digest = xxh3_64()  # of those bytes
        self._file: IO[bytes] | None = None
        self._broken = True  # whether a part of a line may stand after the last whole one

    def state_dict(self) -> dict[str, Any]:
        """How far it is written, and a checksum of it up to there."""
        return {"bytes": self._good, "step": self._step, "xxh3": self._digest.hexdigest()}

    def append(self, line: Mapping[str, Any]) -> None:
        """Writes one line. NaN and Inf are written as text: JSON has none."""
        self._write(dumps(line).encode() + b"\n")
        self._step = int(line.get("step", self._step))

    def begin(self) -> None:
        """Begins with an empty file."""
        self._cut(0)

    def back_to(self, state: Mapping[str, Any], *, kept: bytes) -> None:
        """Cuts back what was written after ``state``, but for whole lines that hold ``kept``.

        Where the file is not what the state tells of (it was cut or damaged), the lines up to its step that can be read
        are kept, and a person is told.
        """
        if self._aside() or not self._holds(state):
            good = [line for line in self._readable() if json.loads(line)["step"] <= state.get("step", float("inf"))]
            rest = f"the {len(good)} readable lines before it are kept; the curves have a gap"
            self._say(f"{self.path} does not match the checkpoint (cut or damaged): {rest}")
            self._cut(0)
            self._write(b"".join(good))
            self._step = int(state.get("step", 0))
            return
        file = self._opened()
        file.seek(int(state["bytes"]))
        later = [line for line in file.read().splitlines(keepends=True) if kept in line and line.endswith(b"\n")]
        self._cut(int(state["bytes"]))
        self._step = int(state.get("step", 0))
        self._write(b"".join(later))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._aside()
            self._file = self.path.open("r+b" if self.path.exists() else "w+b", buffering=0)
        return self._file

    def _aside(self) -> bool:
        """Takes away what is no file, or a link, which may lead elsewhere; whether there was anything."""
        if not self.path.is_symlink() and (not self.path.exists() or self.path.is_file()):
            return False
        self.path.rename(self.path.with_name(f"bad-{self.path.name}-{time.time_ns()}"))
        return True

    def _holds(self, state: Mapping[str, Any]) -> bool:
        """Whether the file begins as the state tells; leaves the digest of that."""
        length, self._digest = int(state["bytes"]), xxh3_64()
        file = self._opened()
        file.seek(0)
        while length and (chunk := file.read(min(length, _CHUNK))):
            self._digest.update(chunk)
            length -= len(chunk)
        return not length and state.get("xxh3", self._digest.hexdigest()) == self._digest.hexdigest()

    def _readable(self) -> Iterator[bytes]:
        file = self._opened()
        file.seek(0)
        for line in file.read().splitlines():
            try:
                content = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(content, dict) and isinstance(content.get("step"), int):
                yield line + b"\n"

    def _cut(self, good: int) -> None:
        """Nothing after so many bytes; the digest is that of what is before."""
        if not good:
            self._digest = xxh3_64()
        file = self._opened()
        file.truncate(good)
        file.seek(good)
        self._good, self._broken = good, False

    def _write(self, lines: bytes) -> None:
        """After the last whole line: of what a full disk takes only a part of, nothing stays."""
        file = self._opened()
        if self._broken:
            file.truncate(self._good)
            file.seek(self._good)
        self._broken = True
        rest = memoryview(lines)
        while rest:
            rest = rest[file.write(rest) :]
        self._good += len(lines)
        self._digest.update(lines)
        self._broken = False
