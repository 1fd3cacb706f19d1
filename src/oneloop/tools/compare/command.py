"""The options of ``oneloop compare``."""

from collections.abc import Sequence

from oneloop.basics.command_options import Options, names
from oneloop.basics.exit_codes import DONE, BadInput
from oneloop.checkpoint.mirror import local_run


def compare(words: Sequence[str]) -> int:
    """Print what differs between runs: keys, final and best metrics, curves, and whether they are
    bit-identical."""
    from oneloop.tools.compare.compare_runs import compare as compared

    options = Options("compare", compare.__doc__)
    options.add_argument("runs", type=local_run, nargs="+", metavar="RUN")
    options.add_argument(
        "--metrics", type=names, default=[], metavar="NAME,NAME", help="curves to draw"
    )
    given = options.parse_intermixed_args(words)
    if len(given.runs) < 2:
        raise BadInput("oneloop compare takes two or more run folders")
    compared(given.runs, metrics=given.metrics)
    return DONE
