"""``oneloop watch``: what ``oneloop compare`` shows of runs, drawn again while they train."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from oneloop.basics.files import printable
from oneloop.tools.compare.compare_runs import state, view
from oneloop.tools.run_reader import LOG, Record, distinct, read_record


def watch(
    folders: Sequence[Path],
    *,
    metrics: Sequence[str] = (),
    every: float = 1.0,
    once: bool = False,
    console: Console | None = None,
) -> None:
    """Draw the runs until all are done. A run may begin later.

    Args:
        folders: the run folders.
        metrics: each gets a chart; none: losses, the first metric, gradient norm, throughput.
        every: seconds between two reads; logs that take long to read are read less often.
        once: draw the runs once. So does a call without a terminal, after all have begun.
        console: the terminal; None: the process's own.
    """
    console = console or Console()

    # Without a terminal, wait here for runs that have not begun.
    for folder in folders:
        if not (once or console.is_terminal or folder.is_dir()):
            console.print(Text(printable(state(_read(folder)))), soft_wrap=True)
            while not _read(folder).curves:
                time.sleep(every)
    runs = _read_all(folders)

    # Draw over the whole screen until all are done, and then leave the charts in the terminal. A
    # run that was stopped or has failed can be started again.
    if console.is_terminal and not once:
        with Live(console=console, auto_refresh=False, screen=True) as shown:
            while not all(run.done for run in runs):
                drawn = view(runs, metrics, width=console.width, height=console.height)
                shown.update(drawn, refresh=True)
                time.sleep(every)
                began = time.monotonic()
                runs = _read_all(folders)
                time.sleep(4 * (time.monotonic() - began))
    console.print(view(runs, metrics, width=console.width))


def _read(folder: Path) -> Record:
    """Return a run, which has no curves if it has not begun."""
    if (folder / LOG).exists():
        return read_record(folder)
    return Record(name=folder.resolve().name, folder=folder)


def _read_all(folders: Sequence[Path]) -> list[Record]:
    return distinct(list(map(_read, folders)))
