"""Samples that a data set leaves out while a run reads it, and their list."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from oneloop.basics.files import dumps, printable

_SHOWN = 3  # samples that are printed; the file has all


class SkipSample(ValueError):
    """Raise it in ``data[index]`` to leave a sample out of its micro-batch.

    The data set needs the attribute ``skips = True``, so that a run that cannot leave out samples
    exactly is rejected at its start.
    """


class SkippedRows:
    """Lists the samples that this process has left out: each once, as a line of JSON in a file.

    Before :meth:`begin`, and in processes without a run folder, it prints the first ones only.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._known = set[str]()
        self._say: Callable[[str], object] = partial(print, file=sys.stderr, flush=True)

    def begin(self, file: Path, say: Callable[[str], object] | None) -> None:
        """List the samples in this file, which may hold those of an earlier start.

        Args:
            file: each process has its own.
            say: prints a line; None: print to the standard error.
        """
        self._file = file
        self._say = say or self._say
        self._known.clear()
        if file.exists():
            self._known.update(file.read_text(encoding="utf-8").splitlines())

    def add(self, name: str, skipped: Iterable[tuple[int, str]]) -> None:
        """Add samples of a set that were left out.

        Args:
            name: of the set.
            skipped: index and reason of each sample.
        """
        for index, why in skipped:
            line = dumps({"set": name, "sample": index, "reason": why})
            if line in self._known:
                continue
            self._known.add(line)
            where = f" (listed in {self._file})" if self._file else ""
            if len(self._known) <= _SHOWN:
                self._say(printable(f"left out{where}: {why}"))
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(f"{line}\n")


SKIPPED_ROWS = SkippedRows()
