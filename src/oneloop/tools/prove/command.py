"""The options of ``oneloop prove``."""

from collections.abc import Callable, Sequence
from pathlib import Path

from oneloop.basics.command_options import Options, positive
from oneloop.launch.config_files import read_config


def prove(
    words: Sequence[str], *, start: Callable[[Sequence[str], Path], int] | None = None
) -> int:
    """Compare a parallel layout with one process by training the same few steps, in a temporary
    folder.

    Reports bit-identical (with batch.grain), equal (the gradients agree, and the weights differ
    only by rounding), or different: the first step and tensor, and the likely reason. The exit code
    is 0, 1 if different or failed, or 2 if a check before the first step rejects the recipe.

      oneloop prove my_task.py:MyTask --config_file fsdp2 --every_step
      oneloop prove my_task.py:MyTask --config_file single --double
    """
    options = Options(
        "prove",
        prove.__doc__,
        usage="oneloop prove RECIPE [--key value …] [--config_file FILE] [OPTIONS]",
    )
    options.add_argument(
        "--config_file",
        default="ddp",
        metavar="FILE",
        help="the layout to compare (single, ddp, fsdp2, …); default: ddp",
    )
    options.add_argument(
        "--processes",
        type=positive(int),
        metavar="N",
        help="default: the number in the config file",
    )
    options.add_argument("--steps", type=positive(int), default=8, metavar="N", help="default: 8")
    options.add_argument(
        "--every_step",
        action="store_true",
        help="repeat a micro-batch on all ranks, and compare the ranks, after each step; default: "
        "in a few steps and in the last one, and after each step if a difference is found",
    )
    options.add_argument(
        "--double",
        action="store_true",
        help="train in float64 only, without mixed precision (machine.dtype float64), so that "
        "sums over samples must agree to 1e-9",
    )
    options.add_argument("--json", action="store_true", help="print the result as JSON")
    given, training = options.parse_known_args(words)
    read_config(given.config_file)

    from oneloop.recipe.parse import check_keys  # 0.3 s

    check_keys(training)

    # The slow imports follow the checks.
    from oneloop.tools.prove.prove import prove as command

    return command(given, training, start=start)
