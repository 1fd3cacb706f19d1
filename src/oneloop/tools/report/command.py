"""The options of ``oneloop report``."""

from collections.abc import Sequence
from pathlib import Path

from oneloop.basics.command_options import Options
from oneloop.basics.exit_codes import DONE
from oneloop.basics.files import printable
from oneloop.checkpoint.mirror import address_of, local_run
from oneloop.tools.report.page import write_report


def report(words: Sequence[str]) -> int:
    """Write one HTML page about a run, or about several runs in the same charts.

    The page loads nothing from a network.
    """
    options = Options("report", report.__doc__)
    options.add_argument("runs", type=local_run, nargs="+", metavar="RUN")
    where = "default: report.html in the run folder, or in the current folder for several runs"
    options.add_argument("--to", type=Path, metavar="FILE", help=where)
    given = options.parse_intermixed_args(words)
    to = given.to
    if to is None and address_of(given.runs[0]):  # a copy of a mirror
        to = Path("report.html")
    print(printable(write_report(given.runs, to)))
    return DONE
