"""The options of ``oneloop worth``."""

from collections.abc import Sequence
from pathlib import Path

from oneloop.basics.command_options import Options, names, positive
from oneloop.tools.worth.techniques import check_names


def worth(words: Sequence[str]) -> int:
    """Measure what each technique is worth on this recipe and this machine; takes minutes.

    Trains short real runs with each technique and without it, alone and on top of the others
    (fused, bf16, workers, pinned, channels_last, accumulation, recompute, ema, clip, logging,
    compile, fp16), on one process. Prints a table, and writes worth.json. No weights are kept.
    """
    options = Options(
        "worth", worth.__doc__, usage="oneloop worth RECIPE [--key value …] [OPTIONS]"
    )
    only = "techniques; default: the first eight that this recipe supports"
    options.add_argument("--only", type=names, default=[], metavar="NAME,NAME", help=only)
    options.add_argument("--rounds", type=positive(int), default=5, metavar="N", help="default: 5")
    options.add_argument(
        "--seconds", type=positive(float), default=1.0, metavar="S", help="of a run; default: 1"
    )
    options.add_argument("--to", type=Path, metavar="DIR", help="default: runs/worth-RECIPE")
    given, training = options.parse_known_args(words)
    check_names(given.only)

    from oneloop.recipe.parse import check_keys  # 0.3 s

    check_keys(training)

    # The slow imports follow the checks.
    from oneloop.tools.worth.worth import worth as command

    return command(training, given.to, only=given.only, rounds=given.rounds, seconds=given.seconds)
