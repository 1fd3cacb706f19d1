"""Standard output and errors that cannot end a run."""

import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class _Lossy(FileIO):
    """Drops what cannot be written: the disk is full, or the reader has closed the pipe."""

    replaced: Any

    def write(self, data: Any) -> int:
        with suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


def lossy(stream: Any) -> Any:
    """Return a stream to the same file, to which writing succeeds, whatever is behind it.

    A stream that belongs to a notebook or a test is returned unchanged.
    """
    if type(stream) is not TextIOWrapper:
        return stream
    with suppress(OSError):
        stream.flush()
    raw = _Lossy(stream.fileno(), "w", closefd=False)
    raw.replaced = stream  # it would close the file when nothing refers to it
    return TextIOWrapper(BufferedWriter(raw), stream.encoding, "replace", line_buffering=True)


def replace_unknown_characters() -> None:
    """Print ``?`` in place of a character that the encoding of a standard stream lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
