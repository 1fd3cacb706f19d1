"""Standard output and errors that cannot end a run."""

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NAMES = ("stdout", "stderr")


class _Lossy(io.RawIOBase):
    """Writes to the file descriptor of a stream, and drops what cannot be written: the disk is
    full, or the reader has closed the pipe."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream  # closes its descriptor once it is unused
        self._descriptor = stream.fileno()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: "memoryview | bytes") -> int:  # type: ignore[override]
        left = memoryview(data)
        with suppress(OSError):  # what is left is lost; the run does not depend on it
            while left:
                left = left[os.write(self._descriptor, left) :]
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
        raw = getattr(stream.buffer, "raw", None)
        if not isinstance(raw, _Lossy):
            setattr(sys, name, _lossy(stream))


@contextmanager
def never_failing() -> Iterator[None]:
    """:func:`never_fail` in this context."""
    before = {name: getattr(sys, name) for name in _NAMES}
    never_fail()
    try:
        yield
    finally:
        for name, stream in before.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)


def _lossy(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    with suppress(OSError):
        stream.flush()
    buffer = io.BufferedWriter(_Lossy(stream))  # type: ignore[type-var]
    return io.TextIOWrapper(
        buffer,
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering or stream is sys.stderr,
        write_through=stream.write_through,
    )
