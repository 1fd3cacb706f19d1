"""The file metrics.jsonl.

Lines are written atomically, truncated at a resume, and repaired after damage.

>>> lines = Lines(Path("metrics.jsonl"))
>>> lines.append({"step": 1, "train/loss": 2.3})
>>> state = lines.state_dict()                  # length, last step and checksum
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from xxhash import xxh3_64

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import dumps, printable, set_aside
from oneloop.basics.untrusted import damaged, parsed_json

_MOST_STEPS = 1 << 53


class Lines:
    """A file of JSON objects, one per line.

    Args:
        path: the file.
        say: reports damage to it.
    """

    # The training process writes with it. Record (run_reader.py) only reads.
    def __init__(self, path: Path, *, say: Callable[[str], object] = print) -> None:
        self.path = path
        self._say = say
        self._good = 0  # bytes of complete lines
        self._step = 0  # of the last one
        self._digest = xxh3_64()  # of the first ``_good`` bytes
        self._file: IO[bytes] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the bytes written, the last step and a checksum."""
        return {"bytes": self._good, "step": self._step, "xxh3": self._digest.hexdigest()}

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, with NaN and Inf as text, since JSON does not have them."""
        self._write(dumps(line).encode() + b"\n")
        self._step = line["step"]

    def begin(self) -> None:
        """Start with an empty file."""
        self._write(b"")

    def back_to(self, state: Mapping[str, Any], *, kept: bytes) -> None:
        """Truncate the file to ``state``, but keep later complete lines that contain ``kept``.

        If the file does not match the state (it was truncated or damaged), keep the readable lines
        up to its step, and report that.

        Args:
            state: what :meth:`state_dict` returned.
            kept: part of the lines to keep.
        """
        file = self._opened()
        file.seek(0)
        content = file.read()

        # Keep what the checkpoint refers to, or else the lines before it that can be read.
        step = state["step"]
        old = content[: state["bytes"]]
        if xxh3_64(old).hexdigest() == state["xxh3"]:
            later = content[len(old) :].splitlines(keepends=True)
            lines = [line for line in later if kept in line and line.endswith(b"\n")]
        else:
            old = b""
            lines = []
            for line in content.splitlines():
                for entry in parsed([line]):  # none if it is damaged
                    if entry["step"] <= step:
                        lines.append(line + b"\n")
            self._say(
                f"{self.path} does not match the checkpoint (cut or damaged): the {len(lines)} "
                "readable lines before it are kept; the curves have a gap"
            )

        # The next write truncates the file.
        self._good = len(old)
        self._digest = xxh3_64(old)
        self._step = step
        self._write(b"".join(lines))

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _opened(self) -> IO[bytes]:
        """Return the open file; rename a link, a folder or a pipe in its place."""
        if self._file is None:
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
                set_aside(self.path)
            self._file = self.path.open("a+b", buffering=0)
        return self._file

    def _write(self, lines: bytes) -> None:
        """Append after the last complete line.

        This removes a line that a full disk has cut off.
        """
        file = self._opened()
        file.truncate(self._good)
        rest = memoryview(lines)
        while rest:
            rest = rest[file.write(rest) :]
        self._good += len(lines)
        self._digest.update(lines)


def parsed(lines: Iterable[bytes], *, of: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of metrics.jsonl: readers can use the step and the kind of each.

    Args:
        lines: with their line ends. The last one may lack it: it is incomplete, and skipped.
        of: the file, for messages; None: skip damaged lines, too.

    Raises:
        BadInput: a line is damaged.
    """
    for text in lines:
        try:
            with damaged("it"):
                line: dict[str, Any] = parsed_json(text)
                step = line["step"]
                if type(step) is not int or not 0 <= step < _MOST_STEPS:
                    raise ValueError(f"its step is {step!r:.60}")
                for name in ("event", "weights"):
                    if not isinstance(line.get(name, ""), str):
                        raise ValueError(f"its {name} is not a text")
        except ValueError as error:
            if of is not None and text.endswith(b"\n"):
                raise BadInput(
                    f"{of} has a damaged line ({printable(error)}: {text!r:.60}); remove the line "
                    "(a resume of the run does so, too)"
                ) from error
        else:
            yield line
