"""The question of ``oneloop plan``: its words, checked before torch is imported."""

from argparse import Namespace
from collections.abc import Sequence
from math import inf

from oneloop.basics.command_options import Options, positive
from oneloop.basics.exit_codes import BadInput
from oneloop.launch.command import hide_warnings_of_torch
from oneloop.launch.config_files import read_config
from oneloop.tools.plan.asked import Asked
from oneloop.tools.plan.gpus import ANY, GPUS, Gpu

_HELP = """Report memory, transfers and FLOPs of a run on any number of GPUs, and a \
change that makes it fit.

  oneloop plan llama-7b --config_file fsdp2 --mixed_precision bf16 --processes 64 --gpu h100

Runs the real step of training on tensors without memory, on a CPU. The exit code is 1 if the run \
does not fit, and 3 if this is not known, because something cannot be counted exactly.
"""


def plan(words: Sequence[str]) -> int:
    """Report what a run needs, and a change that makes it fit; needs no GPU."""
    given = parsed(words)
    hide_warnings_of_torch()
    from oneloop.tools.plan.plan import run

    return run(given)


def parsed(words: Sequence[str]) -> Namespace:
    """Return the options of a plan, with ``asked`` and ``device``, its name and GPU.

    Raise BadInput for words that are wrong, as far as that needs no import of torch.
    """
    given, training = _options().parse_known_args(words)
    given.device = None if given.gpu is None else _gpu(given.gpu)
    given.asked = _asked(given, training)
    return given


def _options() -> Options:
    options = Options("plan", _HELP, usage="oneloop plan RECIPE [--key value …] [OPTIONS]")
    options.add_argument(
        "--config_file", metavar="FILE", help="the layout (ddp, fsdp2, …); default: single or ddp"
    )
    options.add_argument(
        "--processes",
        type=positive(int),
        metavar="N",
        help="default: the number in the config file",
    )
    options.add_argument(
        "--nodes", type=positive(int), metavar="M", help="default: the number in the config file"
    )
    options.add_argument(
        "--mixed_precision",
        choices=("no", "bf16", "fp16", "fp8"),
        help="default: that of the config file",
    )
    options.add_argument(
        "--gpu", metavar="GPU", help=f"{', '.join(GPUS)}, or its memory in GiB (23.5)"
    )
    options.add_argument(
        "--no_changes", action="store_true", help="do not search for a change that makes it fit"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def _gpu(text: str) -> tuple[str, Gpu]:
    """Return the name and the device of ``--gpu``. Raise BadInput."""
    if text in GPUS:
        return text, GPUS[text]
    try:
        memory = float(text)
    except ValueError:
        memory = 0.0
    if not 0 < memory < inf:
        raise BadInput(
            f"--gpu {text} is unknown; known: {', '.join(GPUS)}, or its memory in GiB (--gpu 23.5)"
        )
    return "a GPU", Gpu(memory, ANY)


def _asked(given: Namespace, training: Sequence[str]) -> Asked:
    """Return what to plan; fill in numbers from the config file. Raise BadInput."""
    from oneloop.recipe.parse import check_keys  # 0.3 s

    if not training or training[0].startswith("-"):
        raise BadInput(
            "oneloop plan takes a recipe first; for example: oneloop plan gpt --processes 8"
        )
    file = given.config_file
    if not file:
        several = given.processes is not None and given.processes > 1
        file = "ddp" if several else "single"
    config = read_config(file)
    try:
        # Read both numbers: a wrong one is rejected, even if an option replaces it.
        processes = int(config.get("num_processes") or 1)
        nodes = int(config.get("num_machines") or 1)
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"--config_file {file} has no number as num_processes or num_machines: {error}"
        ) from None
    processes = given.processes or processes
    nodes = given.nodes or nodes
    if processes % nodes:
        raise BadInput(
            f"{processes} processes cannot be divided among {nodes} nodes; change --processes "
            "or --nodes"
        )
    check_keys(training)
    capability = ANY
    if given.device is not None:
        capability = given.device[1].capability
    return Asked(tuple(training), file, processes, nodes, given.mixed_precision, capability)
