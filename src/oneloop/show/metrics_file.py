"""The file metrics.jsonl.

Lines are written atomically, truncated at a resume, and repaired after damage.

>>> lines = Lines(Path("metrics.jsonl"))
>>> lines.append({"step": 1, "train/loss": 2.3})
>>> state = lines.state_dict()                  # length, last step and checksum
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_64

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, printable, set_aside
from oneloop.basics.untrusted import damaged, parsed_json

_CHUNK = 1 << 22  # bytes per read
_MOST_STEPS = 1 << 53


class Lines:
    """A file of JSON objects, one per line.

    Args:
        path: the file.
        say: reports damage to it.
    """

    # The training process writes with it. Record and Follower (run_reader.py) only read, and skip
    # damaged lines.
    def __init__(self, path: Path, *, say: Callable[[str], object] = print) -> None:
        self.path = path
        self._say = say
        self._good = 0  # bytes of complete lines
        self._step = 0  # of the last one
        self._digest = xxh3_64()  # of the first ``_good`` bytes
        self._file: IO[bytes] | None = None
        self._broken = True  # whether an incomplete line may follow the last complete one

    def state_dict(self) -> dict[str, Any]:
        """Return the bytes written, the last step and a checksum."""
        return {"bytes": self._good, "step": self._step, "xxh3": self._digest.hexdigest()}

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, with NaN and Inf as text, since JSON does not have them."""
        self._write(dumps(line).encode() + b"\n")
        self._step = int(line.get("step", self._step))

    def begin(self) -> None:
        """Start with an empty file."""
        self._cut(0)

    def back_to(self, state: Mapping[str, Any], *, kept: bytes) -> None:
        """Truncate the file to ``state``, but keep later complete lines that contain ``kept``.

        If the file does not match the state (it was truncated or damaged), keep the readable lines
        up to its step, and report that.

        Args:
            state: what :meth:`state_dict` returned.
            kept: part of the lines to keep.
        """
        # Rewrite a file that does not match from its readable lines.
        if self._move_invalid() or not self._holds(state):
            most = state["step"]
            good = [line for line in self._readable() if json.loads(line)["step"] <= most]
            self._say(
                f"{self.path} does not match the checkpoint (cut or damaged): the {len(good)} "
                "readable lines before it are kept; the curves have a gap"
            )
            self._cut(0)
            self._write(b"".join(good))
            self._step = most
            return

        # Truncate a file that matches, and append the lines to keep.
        file = self._opened()
        file.seek(int(state["bytes"]))
        lines = file.read().splitlines(keepends=True)
        later = [line for line in lines if kept in line and line.endswith(b"\n")]
        self._cut(int(state["bytes"]))
        self._step = state["step"]
        self._write(b"".join(later))

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._move_invalid()
            self._file = self.path.open("r+b" if self.path.exists() else "w+b", buffering=0)
        return self._file

    def _move_invalid(self) -> bool:
        """Rename the path if it is a link or not a regular file; return whether it was."""
        if not self.path.is_symlink() and (not self.path.exists() or self.path.is_file()):
            return False
        set_aside(self.path)
        return True

    def _holds(self, state: Mapping[str, Any]) -> bool:
        """Return whether the file begins with the content of ``state``; set the digest to it."""
        length = int(state["bytes"])
        self._digest = xxh3_64()
        file = self._opened()
        file.seek(0)
        while length and (chunk := file.read(min(length, _CHUNK))):
            self._digest.update(chunk)
            length -= len(chunk)
        if length:
            return False  # the file is too short
        return bool(state["xxh3"] == self._digest.hexdigest())

    def _readable(self) -> Iterator[bytes]:
        """Yield the lines that are complete."""
        file = self._opened()
        file.seek(0)
        for line in file.read().splitlines():
            if any(parsed([line])):
                yield line + b"\n"

    def _cut(self, good: int) -> None:
        """Truncate the file to ``good`` bytes, whose digest is already set."""
        if not good:
            self._digest = xxh3_64()
        file = self._opened()
        file.truncate(good)
        file.seek(good)
        self._good = good
        self._broken = False

    def _write(self, lines: bytes) -> None:
        """Append after the last complete line.

        This removes a line that a full disk has cut off.
        """
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


def parsed(lines: Iterable[bytes], *, of: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of metrics.jsonl.

    Args:
        lines: with their line ends. The last one may lack it: it is incomplete, and skipped.
        of: the file, for messages; None: skip damaged lines, too.

    Raises:
        BadInput: a line is damaged.
    """
    for line in lines:
        try:
            yield _parsed(line)
        except ValueError as error:
            if of is not None and line.endswith(b"\n"):
                raise BadInput(
                    f"{of} has a damaged line ({printable(error)}: {line!r:.60}); remove the line "
                    "(a resume of the run does so, too)"
                ) from error


@damaged("it")
def _parsed(text: bytes) -> dict[str, Any]:
    """Return a line of which readers can use the step and what kind of line it is."""
    line: dict[str, Any] = parsed_json(text)
    step = line["step"]
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise ValueError(f"its step is {step!r:.60}")
    for name in ("event", "weights"):
        if not isinstance(line.get(name, ""), str):
            raise ValueError(f"its {name} is not a text")
    return line
