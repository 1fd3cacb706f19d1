"""The argument parser of all keys of a recipe.

They include the arguments of the chosen task, optimizer and schedule.
"""

from argparse import SUPPRESS, Action
from collections.abc import Iterable, Sequence
from copy import deepcopy
from functools import cache
from inspect import signature
from typing import Any, get_args

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings
from jsonargparse.typing import register_type

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.class_paths import CHOICES, resolve
from oneloop.recipe.key_rules import shown
from oneloop.recipe.read import packaged
from oneloop.recipe.schema import GROUPS

register_type(Duration, serializer=lambda duration: duration.text, deserializer=Duration)
set_parsing_settings(docstring_parse_attribute_docstrings=True)

# arguments that are no keys
_NOT_OPTIONS: dict[str, set[str | int]] = {
    "task": set(),
    "optimizer": {
        "params",
        "model",
        "lr",
        "weight_decay",
        "foreach",
        "fused",
        "capturable",
        "maximize",
        "differentiable",
        "decoupled_weight_decay",
    },
    "schedule": {"step", "total", "final", "reductions", "optimizer", "last_epoch"},
}


class _Help(DefaultHelpFormatter):
    """Help that shows each value as its type (INT, {auto,none}).

    It leaves out the variants that append to a list.
    """

    def _get_type_str(self, action: Action) -> None:
        return None

    def _format_action_invocation(self, action: Action) -> str:
        named = [option for option in action.option_strings if not option.endswith("+")]
        return f"{', '.join(named)} {action.metavar or ''}".rstrip()


def parser(task: str, optimizer: str, schedule: str) -> ArgumentParser:
    """Return the parser of all keys. That of packaged names is built once per process.

    Args:
        task: the name of the chosen task.
        optimizer: the name of the chosen optimizer.
        schedule: the name of the chosen schedule.
    """
    chosen = {"task": task, "optimizer": optimizer, "schedule": schedule}
    known = all(name in CHOICES[group] for group, name in chosen.items())
    build = _with_options_once if known else _with_options
    return _without_completion(build(task, optimizer, schedule))


def common_parser() -> ArgumentParser:
    """Return the parser of the keys that every recipe has, without an import of torch."""
    return _without_completion(_common())


def _without_completion(made: ArgumentParser) -> ArgumentParser:
    # each parse adds it
    made._actions[:] = [action for action in made._actions if action.dest != "print_shtab"]
    return made


@cache
def _common() -> ArgumentParser:
    made = ArgumentParser(
        prog="oneloop.train",
        usage="oneloop launch --config_file single RECIPE [--key value …]   (or python -m "
        "oneloop.train RECIPE …)",
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=_Help,
    )

    # Add the keys without a group.
    made.add_argument("--seed", type=int, default=0, help="seed of everything random")
    made.add_argument(
        "--duration",
        type=Duration,
        default=Duration("10ep"),
        help="length of training: steps (500), '20ep', '1M samples', '2B tokens'",
    )
    made.add_argument(
        "--track",
        type=list[str],
        default=["tensorboard"],
        help="trackers by accelerate's names, comma-separated: tensorboard, wandb, trackio, "
        "mlflow, … ('none': none)",
    )

    # Add the groups.
    for name, group in GROUPS.items():
        section = made.add_argument_group(name)
        if name == "init":  # a field cannot have the name "from"
            section.add_argument(
                "--init.from",
                type=str | None,
                default=None,
                help="run folder, folder of weights, hf:NAME or .safetensors file to take the "
                "weights from",
            )
        section.add_class_arguments(group, name, skip={"options", "source"}, as_group=False)
    return made


def _with_options(task: str, optimizer: str, schedule: str) -> ArgumentParser:
    # A copy takes a hundredth of the time that the common keys take.
    made = deepcopy(_without_completion(_common()))
    made.description = (
        f"Trains a recipe: a packaged one ({', '.join(packaged())}), the path of a "
        "YAML file, or a task of your own (my_task.py:MyTask). Keys of the chosen task "
        f"({task}), optimizer ({optimizer}) and schedule ({schedule}) are included."
    )

    # Each group also lists the options of what is chosen. Those of a dataclass are a section, which
    # comes next in the help.
    for group, name in (("task", task), ("optimizer", optimizer), ("schedule", schedule)):
        common = list(made._action_groups)
        titles = [section.title for section in common]
        place = titles.index(group)
        _add_options(made, common[place], group, name)
        added = made._action_groups[len(common) :]
        made._action_groups = [*common[: place + 1], *added, *common[place + 1 :]]

    # Show each value as its type.
    for action in made._actions:
        if kind := getattr(action, "_typehint", None) or action.type:
            action.metavar = shown(kind)
    return made


def _add_options(made: ArgumentParser, section: Any, group: str, chosen: str) -> None:
    """Add the arguments of a task, optimizer or schedule. Raise BadInput for a reserved name."""
    # Add its arguments. jsonargparse also adds an option for help on each, which is removed.
    target = resolve(group, chosen)
    parameters = signature(target).parameters
    taken = {"name", "options"} & parameters.keys()
    if taken and chosen not in CHOICES[group]:
        raise BadInput(
            f"{group}.name {chosen!r}: rename the argument {taken.pop()!r}, a key of oneloop"
        )
    if group == "schedule" and "optimizer" in parameters:
        _add_torch_schedule(section, target)
        return
    if isinstance(target, type):
        add = section.add_class_arguments
    else:
        add = section.add_function_arguments
    add(target, group, skip=_NOT_OPTIONS[group], as_group=False, fail_untyped=False)
    for action in [action for action in made._actions if action.dest.endswith(".help")]:
        action.container._remove_action(action)  # type: ignore[attr-defined]

    # jsonargparse gives an argument without type and default null: require a value.
    untyped = [one for one in parameters.values() if one.default is one.annotation is one.empty]
    required = {f"{group}.{one.name}" for one in untyped}
    for action in made._actions:
        action.required = action.required or action.dest in required


def _add_torch_schedule(section: Any, target: Any) -> None:
    """Add the arguments of a schedule of torch, none of which is required: the run completes them.

    Those that count steps also take durations.
    """
    # Let jsonargparse find their types and descriptions.
    found = ArgumentParser()
    add = found.add_class_arguments if isinstance(target, type) else found.add_function_arguments
    add(target, "schedule", skip=_NOT_OPTIONS["schedule"], as_group=False, fail_untyped=False)
    arguments = {f"schedule.{name}": one for name, one in signature(target).parameters.items()}

    for action in found._actions:
        argument = arguments.get(action.dest)
        if argument is None:  # an option for help
            continue
        kind = getattr(action, "_typehint", action.type)
        required = argument.default is argument.empty
        if kind in (list[int], Iterable[int], Sequence[int]):
            kind = list[int | Duration]
        elif kind is int or int in get_args(kind):
            kind = kind | Duration
        elif required and argument.annotation is argument.empty:
            kind = int | Duration
        default = SUPPRESS if required else argument.default
        section.add_argument(f"--{action.dest}", type=kind, default=default, help=action.help)


_with_options_once = cache(_with_options)
