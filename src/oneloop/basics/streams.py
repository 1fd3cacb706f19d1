"""Standard output and errors that cannot end a run."""

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NAMES = ("stdout", "stderr")


class _Lossy(io.FileIO):
    """Drops what cannot be written: the disk is full, or the reader has closed the pipe."""

    before: io.TextIOWrapper  # closes the file descriptor once it is unused

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


def replace_unknown_characters() -> None:
    """Print ``?`` in place of a character that the encoding of a standard stream lacks."""
    for name in _NAMES:
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def never_fail() -> None:
    """Make writing to the standard streams of this process succeed, whatever is behind them."""
    for name in _NAMES:
        stream = getattr(sys, name)
        # Other streams belong to a notebook or a test.
        if type(stream) is not io.TextIOWrapper:
            continue
        with suppress(OSError):
            stream.flush()
        raw = _Lossy(stream.fileno(), "w", closefd=False)
        raw.before = stream
        buffering = stream.line_buffering or name == "stderr"
        lossy = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=stream.encoding,
            errors="replace",
            line_buffering=buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lossy)


@contextmanager
def never_failing() -> Iterator[None]:
    """:func:`never_fail` in this context."""
    before = sys.stdout, sys.stderr
    never_fail()
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
