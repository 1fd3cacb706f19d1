"""The argument parser of all keys of a recipe.

They include the arguments of the chosen task, optimizer and schedule.
"""

from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from inspect import signature
from typing import Any, get_args

from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings
from jsonargparse.typing import register_type

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.class_paths import CHOICES, packaged, resolve
from oneloop.recipe.key_rules import shown
from oneloop.recipe.schema import GROUPS, Recipe

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
    """Return the parser of all keys. That of the same classes is built once per process.

    Args:
        task: the name of the chosen task.
        optimizer: the name of the chosen optimizer.
        schedule: the name of the chosen schedule.
    """
    chosen = {"task": task, "optimizer": optimizer, "schedule": schedule}
    return _with_options(*[(group, name, resolve(group, name)) for group, name in chosen.items()])


@cache
def common_parser() -> ArgumentParser:
    """Return the parser of the keys that every recipe has, without an import of torch."""
    made = ArgumentParser(
        prog="oneloop.train",
        usage="oneloop launch --config_file single RECIPE [--key value …]   (or python -m "
        "oneloop.train RECIPE …)",
        description=f"Trains a recipe: a packaged one ({', '.join(packaged())}), the path of a "
        "YAML file, or a task of your own (my_task.py:MyTask). Keys of the chosen task, optimizer "
        "and schedule are included.",
        exit_on_error=False,
        allow_abbrev=False,
        formatter_class=_Help,
    )
    made.add_class_arguments(Recipe, skip={"name", "resolved", *GROUPS}, as_group=False)
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


@lru_cache(32)
def _with_options(*chosen: tuple[str, str, Any]) -> ArgumentParser:
    """Return the parser of all keys.

    Args:
        chosen: the group, name and class or function of task, optimizer and schedule.
    """
    # A copy takes a hundredth of the time that the common keys take.
    made = deepcopy(common_parser())
    sections = {section.title: section for section in made._action_groups}
    for group, name, target in chosen:
        _add_options(made, sections[group], group, name, target)

    # Show each value as its type. jsonargparse also adds an option for help on each class.
    for action in [*made._actions]:
        if action.dest.endswith(".help"):
            action.container._remove_action(action)  # type: ignore[attr-defined]
        elif kind := getattr(action, "_typehint", None) or action.type:
            action.metavar = shown(kind)
    return made


def types_of(made: ArgumentParser) -> dict[str, Any]:
    """Return the types of all keys of a parser."""
    return {
        action.dest: getattr(action, "_typehint", action.type)
        for action in made._actions
        if action.dest not in ("help", "print_shtab")  # each parse adds the latter
    }


def _add_options(
    made: ArgumentParser, section: Any, group: str, name: str, target: Callable[..., Any]
) -> None:
    """Add the arguments of a task, optimizer or schedule. Raise BadInput for a reserved name."""
    parameters = signature(target).parameters
    taken = {"name", "options"} & parameters.keys()
    if taken and name not in CHOICES[group]:
        raise BadInput(
            f"{group}.name {name!r}: rename the argument {taken.pop()!r}, a key of oneloop"
        )
    if group == "schedule" and "optimizer" in parameters:
        _add_torch_schedule(section, target)
        return
    _add_arguments(section, group, target)

    # jsonargparse gives an argument without type and default null: require a value.
    untyped = [one for one in parameters.values() if one.default is one.annotation is one.empty]
    required = {f"{group}.{one.name}" for one in untyped}
    for action in made._actions:
        action.required = action.required or action.dest in required


def _add_arguments(section: Any, group: str, target: Callable[..., Any]) -> None:
    add = section.add_function_arguments
    if isinstance(target, type):
        add = section.add_class_arguments
    add(target, group, skip=_NOT_OPTIONS[group], as_group=False, fail_untyped=False)


def _add_torch_schedule(section: Any, target: Any) -> None:
    """Add the arguments of a schedule of torch, none of which is required: the run completes them.

    Those that count steps also take durations.
    """
    # Let jsonargparse find their types and descriptions.
    found = ArgumentParser()
    _add_arguments(found, "schedule", target)
    arguments = {f"schedule.{name}": one for name, one in signature(target).parameters.items()}

    for action in found._actions:
        argument = arguments.get(action.dest)
        if argument is None:  # an option for help
            continue
        kind = getattr(action, "_typehint", action.type)
        required = argument.default is argument.empty
        if kind in (list[int], Iterable[int], Sequence[int]):
            kind = list[int | Duration]
        elif int in (kind, *get_args(kind)):
            kind = kind | Duration
        elif required and argument.annotation is argument.empty:
            kind = int | Duration
        default = SUPPRESS if required else argument.default
        section.add_argument(f"--{action.dest}", type=kind, default=default, help=action.help)
