"""Parse recipes: a packaged name or a YAML file, with overrides as ``--group.key value``.

Precedence: defaults < YAML < command line. Processes, precision and sharding come only from
accelerate.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import one_line
from oneloop.recipe.class_paths import arguments, resolve
from oneloop.recipe.expected import OPTIONS
from oneloop.recipe.key_parser import common_parser, parser
from oneloop.recipe.key_rules import wanted, without_effect
from oneloop.recipe.read import find_recipe, flat, from_python, load, long
from oneloop.recipe.schema import GROUPS, Recipe
from oneloop.recipe.training_keys import OptimizerConfig, ScheduleConfig, TaskConfig


def read(argv: Sequence[str]) -> Recipe:
    """Read the recipe of a command line.

    Raise BadInput on errors, and SystemExit after ``--help`` and ``--print_config``.
    """
    source, typed, flags = _split(argv)
    if source is None and "help" in flags and "task.name" not in typed:
        return _made("recipe", {}, typed, flags)
    name, written = find_recipe(source, typed)
    if "help" not in flags:
        _check_without_imports(*_choose(typed, written), typed)
    return _made(name, written, typed, flags)


def check_keys(argv: Sequence[str]) -> None:
    """Check the keys of a command line that need no import of torch. Raise BadInput.

    These are all keys but those of the task and of your own optimizer or schedule.
    """
    source, typed, flags = _split(argv)
    if "help" not in flags:
        _check_without_imports(*_choose(typed, find_recipe(source, typed)[1]), typed)


def _check_without_imports(
    chosen: dict[str, str], written: dict[str, Any], typed: Mapping[str, Any]
) -> None:
    made = common_parser()
    given = written | dict(typed)

    # Collect the known keys, and the beginnings of those that only an imported object knows.
    known = set(_types(made))
    foreign: list[str] = []
    for group, choices in OPTIONS.items():
        if chosen[group] in choices:
            known |= {f"{group}.{option}" for option in choices[chosen[group]]}
        else:
            foreign.append(f"{group}.")
    own = arguments(chosen["task"])
    if own is None:
        foreign.append("task.")
    else:
        known |= {f"task.{name}" for name in own}
        foreign += [f"task.{name}." for name in own]

    # Reject unknown keys, but those that may turn out to be known after an import.
    unknown = [key for key in given if key not in known and not key.startswith(tuple(foreign))]
    if unknown:
        from oneloop.recipe.synonyms import OF_TASKS, may_be_of_task

        if own is None:
            unknown = [key for key in unknown if not may_be_of_task(key)]
        else:
            known |= {key for key in OF_TASKS if key.split(".")[1] in own}
        _reject_unknown(unknown, known)

    # Check the values of the keys that belong to oneloop.
    early = {key: value for key, value in given.items() if key in _types(made)}
    if None not in early.values():  # a flag, or a key without its value
        _namespace(made, early, defaults=False)


def recipe(source: str | Recipe | Mapping[str, Any] | None = None, **groups: Any) -> Recipe:
    """Build a recipe in Python: ``recipe("digits", batch={"size": 128}, duration="5ep")``.

    Args:
        source: a packaged name, the path of a YAML file, ``my_file.py:MyTask``, another recipe, or
            its keys by group; None: the defaults, for the ``task`` in ``groups``.
        groups: keys by group, or ``seed``, ``duration`` and ``track``. A ``task`` may be a class,
            or ``{"name": MyTask, "width": 32}``.

    Raises:
        BadInput: wrong keys or values, or a recipe that cannot be found.
    """
    given = from_python(groups)

    # A recipe stands for its resolved keys, if they are still those of its fields.
    if isinstance(source, Recipe):
        again = _made(source.name, flat(source.resolved), {}, set())
        if again != source:
            raise BadInput(
                "this recipe was changed after it was read; use recipe(old, batch={…}) for a "
                "changed copy"
            )
        return _made(source.name, flat(source.resolved), given, set())

    # Keys by group are the same as keywords, which go first.
    if isinstance(source, Mapping):
        given = from_python(source) | given
        source = None
    return _made(*find_recipe(source, given), given, set())


def read_again(recipe: Path, *, task: str) -> Recipe:
    """Read a run's resolved recipe with this task, without its optimizer and schedule.

    Args:
        recipe: the path of the file.
        task: the name of the task.

    Raises:
        BadInput: the file cannot be read, or has wrong keys or values.
    """
    name, written = load(str(recipe))
    for key in list(written):
        if key.startswith(("optimizer.", "schedule.")):
            del written[key]
    return _made(name, written | {"task.name": task}, {}, set())


def _made(name: str, written: dict[str, Any], typed: dict[str, Any], flags: set[str]) -> Recipe:
    """Return the recipe of a file's and the typed keys. Raise BadInput; SystemExit after a flag."""
    chosen, written = _choose(typed, written)
    made = parser(chosen["task"], chosen["optimizer"], chosen["schedule"])
    if "help" in flags:
        made.print_help()
        raise SystemExit(0)
    kinds = _types(made)
    for key, value in typed.items():
        if value is None and key in kinds and kinds[key] is not bool:
            raise BadInput(f"{key} needs a value: --{key} VALUE")

    # A typed batch.grain replaces the file's micro-batches, which are for runs without it.
    if typed.get("batch.grain") not in (None, "null"):
        written = _without(written, ("batch.micro", "eval.micro"))
    namespace, resolved = _parsed(made, written | typed)

    # Drop the file's keys that typed keys make useless, and parse again.
    defaults = {action.dest: action.default for action in made._actions}
    needs = getattr(resolve("task", chosen["task"]), "needs", {})
    idle = without_effect(flat(resolved), defaults, typed, needs)
    if idle:
        namespace, resolved = _parsed(made, _without(written, idle) | typed)

    recipe = _build(name, namespace, resolved)
    if "print_config" in flags:
        print(recipe.yaml(), end="")
        raise SystemExit(0)
    return recipe


def _without(written: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key not in keys}


def _parsed(made: ArgumentParser, given: Mapping[str, Any]) -> tuple[Namespace, dict[str, Any]]:
    namespace = _namespace(made, given)
    text = made.dump(namespace, skip_unset=False, skip_validation=True)  # parse_args validates
    return namespace, yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _namespace(
    made: ArgumentParser, given: Mapping[str, Any], *, defaults: bool = True
) -> Namespace:
    _reject_unknown(given, _types(made))
    try:
        words = [_argument(key, value, made) for key, value in given.items()]
        return made.parse_args(words, defaults=defaults)
    except Exception as error:  # jsonargparse raises many types; each message names the key
        raise BadInput(_reworded(error, given, made)) from error


def task_name(recipe: Path) -> str:
    """Return the task's name in a resolved recipe, without an import. Raise BadInput on errors."""
    _, written = load(str(recipe))
    name = written.get("task.name", TaskConfig().name)
    if not isinstance(name, str):
        raise BadInput(f"{recipe}: task.name must be a name or a class path, found {name!r}")
    return name


def _split(argv: Sequence[str]) -> tuple[str | None, dict[str, Any], set[str]]:
    """Split a command line into recipe, {key: text, or None without a value}, and flags."""
    source: str | None = None
    typed: dict[str, Any] = {}
    flags: set[str] = set()
    words = list(argv)

    # A key takes the next word as its value, unless that is a key.
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            flags.add("help")
        elif word == "--print_config":
            flags.add("print_config")
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            typed[long(key)] = None
            if equals:
                typed[long(key)] = value
            elif words and not words[0].startswith("--"):
                typed[long(key)] = words.pop(0)
        elif source is None:
            source = word
        else:
            raise BadInput(
                f"two recipes given, {source!r} and {word!r}; give one (values follow a --key)"
            )
    return source, typed, flags


def _choose(
    typed: Mapping[str, Any], written: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the names of task, optimizer and schedule by group, and the file's keys.

    A newly typed name drops the file's options for the old one.
    """
    defaults = {
        "task": TaskConfig().name,
        "optimizer": OptimizerConfig().name,
        "schedule": ScheduleConfig().name,
    }
    chosen = {}

    # What is typed goes before the file, and that before the default.
    for group, default in defaults.items():
        old = written.get(f"{group}.name", default)
        new = typed.get(f"{group}.name") or old
        if not isinstance(new, str):
            raise BadInput(f"{group}.name must be a name or a class path, found {new!r}")
        if new != old:
            # Keep the keys that all choices of the group have.
            common = {f"{group}.{field.name}" for field in fields(GROUPS[group])}
            options = [key for key in written if key.startswith(f"{group}.") and key not in common]
            written = _without(written, options)
        chosen[group] = new
    return chosen, written


@cache
def _types(made: ArgumentParser) -> dict[str, Any]:
    return {
        action.dest: getattr(action, "_typehint", action.type)
        for action in made._actions
        if action.dest != "help"
    }


def _reject_unknown(given: Iterable[str], known: Collection[str]) -> None:
    for key in given:
        if key in GROUPS:
            inside = [name for name in known if name.startswith(f"{key}.")]
            raise BadInput(
                f"{key} is a group of keys and has no value; its keys: {', '.join(inside)}"
            )
        if key not in known:
            from oneloop.recipe.synonyms import suggestion

            near = suggestion(key, known)
            if near.startswith(":") or "launcher" in near:  # --help does not list the key
                raise BadInput(f"unknown key {key!r}{near}")
            raise BadInput(f"unknown key {key!r}{near} (--help lists all)")


def _argument(key: str, value: Any, made: ArgumentParser) -> str:
    kind = _types(made)[key]
    if value is None and type(None) not in getattr(kind, "__args__", ()):
        if kind is not bool:
            raise BadInput(f"{key} needs a value: --{key} VALUE")
        value = True
    if key == "track" and value in ("none", ""):
        value = []
    elif isinstance(value, str) and _is_list(kind) and not value.startswith(("[", "null")):
        value = f"[{value}]"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"--{key}={text}"


def _is_list(kind: Any) -> bool:
    """Return whether a key of this type takes a list, and nothing else but null."""
    if get_origin(kind) in (Union, UnionType):
        kinds = [one for one in get_args(kind) if one is not type(None)]
        return all(map(_is_list, kinds))
    return get_origin(kind) in (list, tuple, Sequence) or kind in (list, tuple)


def _reworded(error: Exception, given: Mapping[str, Any], made: ArgumentParser) -> str:
    """Return a message for a parser error; for a wrong type, name the expected type."""
    match = re.match(r'Parser key "([^"]+)":', str(error))
    key = match[1] if match else ""
    takes = wanted(_types(made).get(key))

    # Keep other messages, in plainer words.
    if key not in given or not takes:
        text = re.sub(r'Parser key "([^"]+)":', r"\1:", str(error))
        text = re.sub(
            r"the following arguments are required: (.*)", r"\1 has no default; give a value", text
        )
        return one_line(re.sub(r"<class '([^']+)'>", r"\1", text))

    # Say what the key takes.
    value = given[key]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{key} must be {takes}, got {text}"


def _build(name: str, namespace: Namespace, resolved: dict[str, Any]) -> Recipe:
    return Recipe(
        name=name,
        seed=namespace.seed,
        duration=namespace.duration,
        track=tuple(namespace.track),
        resolved=resolved,
        **_groups(namespace),
    )


def _groups(namespace: Namespace) -> dict[str, Any]:
    """Return an object of each group's class, by group."""
    built: dict[str, Any] = {}
    for group, kind in GROUPS.items():
        values = namespace[group].as_dict()
        if group == "init":
            values["source"] = values.pop("from")  # which Python reserves

        # Keys that are not fields of the class are options of the chosen object.
        common = {field.name for field in fields(kind)}
        own = {key: values.pop(key) for key in list(values) if key not in common}
        if "options" in common:
            values["options"] = own
        built[group] = kind(**values)
    return built
