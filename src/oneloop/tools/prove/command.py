"""The options of ``oneloop prove``."""

from collections.abc import Callable, Sequence

from oneloop.basics.command_options import Options, positive
from oneloop.launch.config_files import read_config

Start = Callable[[Sequence[str], int], int]
"""runs ``oneloop launch`` with these arguments; output goes to the file descriptor; returns the
exit code"""


def prove(words: Sequence[str], *, start: Start | None = None) -> int:
    """Compare a parallel layout with one process by training the same few steps, in a temporary
    folder.

    Reports bit-identical (with batch.grain), equal (the gradients agree, and the weights differ
    only by rounding), or different: the first step and tensor, and the likely reason. The exit code
    is 0, or 1 if different or failed.

      oneloop prove my_task.py:MyTask --config_file fsdp2
    """
    options = Options(
        "prove",
        prove.__doc__,
        usage="oneloop prove RECIPE [--key value …] --config_file FILE [OPTIONS]",
    )
    options.add_argument(
        "--config_file", required=True, metavar="FILE", help="the layout to compare (ddp, fsdp2, …)"
    )
    options.add_argument(
        "--processes",
        type=positive(int),
        metavar="N",
        help="default: the number in the config file",
    )
    options.add_argument("--steps", type=positive(int), default=8, metavar="N", help="default: 8")
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    given, training = options.parse_known_args(words)
    read_config(given.config_file)

    from oneloop.recipe.parse import check_keys  # 0.3 s

    check_keys(training)

    # The slow imports follow the checks.
    from oneloop.tools.prove.prove import prove as command

    return command(given, training, start=start)
