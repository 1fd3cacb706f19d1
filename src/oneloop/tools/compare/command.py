"""The options of ``oneloop compare`` and ``oneloop watch``."""

import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from oneloop.basics.command_options import Options, names, positive
from oneloop.basics.exit_codes import DONE, BadInput
from oneloop.checkpoint.mirror import local_run


def compare(words: Sequence[str]) -> int:
    """Print what differs between runs: keys, final and best metrics, curves, and whether they are
    bit-identical."""
    from oneloop.tools.compare.compare_runs import compare as compared

    options = _options("compare", compare.__doc__)
    given = options.parse_intermixed_args(words)
    if len(given.runs) < 2:
        raise BadInput("oneloop compare takes two or more run folders")
    compared(given.runs, metrics=given.metrics)
    return DONE


def watch(words: Sequence[str]) -> int:
    """Draw the metrics of runs in the terminal, while they train: several in the same charts.

    It waits for a run that has not begun.
    """
    from oneloop.tools.compare.watch import watch as live

    options = _options("watch", watch.__doc__)
    options.add_argument("--once", action="store_true", help="draw the metrics as they are now")
    options.add_argument(
        "--every", type=positive(float), default=1.0, metavar="SECONDS", help="default: 1"
    )
    given = options.parse_intermixed_args(words)
    for folder in given.runs:
        if folder.exists() and not folder.is_dir():
            raise BadInput(f"{folder} is a file; give the folder of a run")
        if given.once and not (folder / "metrics.jsonl").exists():
            raise BadInput(
                f"{folder} holds no run (no metrics.jsonl); without --once, oneloop watch waits"
            )
    # End as an exception would: the exit restores the terminal.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with suppress(KeyboardInterrupt):
        live(given.runs, metrics=given.metrics, every=given.every, once=given.once)
    return DONE


def _options(name: str, about: str | None) -> Options:
    options = Options(name, about)
    options.add_argument("runs", type=local_run, nargs="+", metavar="RUN")
    metrics = "names of curves, as in metrics.jsonl (train/loss, eval/accuracy, speed/mfu)"
    options.add_argument("--metrics", type=names, default=[], metavar="NAME,NAME", help=metrics)
    return options
