"""The words of ``oneloop doctor``, checked before torch is imported."""

import os
from collections.abc import Sequence

from oneloop.basics.command_options import Options
from oneloop.launch.command import (
    NODE_OPTIONS,
    hide_warnings_of_torch,
    split,
    split_words,
)
from oneloop.launch.config_files import read_config
from oneloop.tools.nodes import nodes

_HELP = """Check that this host can train, and that several hosts can train together.

  oneloop doctor --nodes 2 --rendezvous HOST:PORT --config_file fsdp2 gpt --run.dir /shared/gpt

Takes the words of `oneloop launch`; the recipe may be missing. Start it on all hosts, as you
would start a run. Checks devices, limits, disk and caches of each host; then versions,
settings, clocks and run folder of all hosts, and each link between their processes. The exit
code is 1 if there is a problem.
"""


def doctor(words: Sequence[str]) -> int:
    """Check that this host can train, and that several hosts can train together."""
    checked(words)
    hide_warnings_of_torch()
    from oneloop.tools.doctor.doctor import run

    return run(words)


def checked(words: Sequence[str]) -> None:
    """Raise BadInput if the words are wrong, as far as that needs no slow import."""
    if words[:1] in (["-h"], ["--help"]):
        usage = "oneloop doctor [--json] [OPTIONS] [RECIPE --key value …]"
        Options("doctor", _HELP, usage=usage).parse_args(words)

    # The last word stands for a missing recipe.
    given = [word for word in words if word != "--json"]
    own, rest = split([*given, "no-recipe"], NODE_OPTIONS)
    nodes(own, os.environ)
    known = split_words(rest)
    if known is not None:
        if "config_file" in known[0]:
            read_config(known[0]["config_file"])
        if known[1][:-1]:
            from oneloop.recipe.parse import check_keys  # 0.3 s

            check_keys(known[1][:-1])
