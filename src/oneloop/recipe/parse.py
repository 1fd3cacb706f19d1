"""Parse recipes: a packaged name or a YAML file, with overrides as ``--group.key value``.

Precedence: defaults < YAML < command line. Processes, precision and sharding come only from
accelerate.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, Namespace

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import flattened, one_line
from oneloop.basics.houses import missing
from oneloop.basics.untrusted import parsed_yaml
from oneloop.recipe.class_paths import (
    CHOICES,
    RECIPES,
    only_task,
    packaged,
    path_of,
    resolve,
    split_path,
)
from oneloop.recipe.key_parser import common_parser, parser, types_of
from oneloop.recipe.key_rules import described, reject_out_of_range, shown, without_effect
from oneloop.recipe.schema import GROUPS, ParametersConfig, Recipe
from oneloop.recipe.synonyms import suggestion

# keys of the packaged tasks, optimizers and schedules, which docs/reference/make_keys.py writes
_PACKAGED_KEYS: dict[str, dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("packaged_keys.json").read_text(encoding="utf-8")
)


def read(argv: Sequence[str]) -> Recipe:
    """Read the recipe of a command line.

    Raise BadInput on errors, and SystemExit after ``--help`` and ``--print_config``.
    """
    source, typed, flags = _split(argv)
    if "help" in flags and source is None:
        typed.setdefault("task.name", GROUPS["task"].name)
    name, written = find_recipe(source, typed)
    if "help" in flags:
        _parser_of(written, typed)[0].print_help()
        raise SystemExit(0)
    _check_without_imports(written, typed)
    recipe = _recipe_of(name, written, typed)
    if "print_config" in flags:
        print(recipe.yaml(), end="")
        raise SystemExit(0)
    return recipe


def check_keys(argv: Sequence[str]) -> None:
    """Check the keys of a command line that need no import of torch. Raise BadInput.

    These are all keys but those of your own task, optimizer or schedule.
    """
    source, typed, flags = _split(argv)
    if "help" not in flags:
        _, written = find_recipe(source, typed)
        _check_without_imports(written, typed)


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
    typed = from_python(groups)

    # Keys by group are the same as keywords, which go first.
    if isinstance(source, Mapping):
        typed = from_python(source) | typed
        source = None
    if not isinstance(source, Recipe):
        name, written = find_recipe(source, typed)
        return _recipe_of(name, written, typed)

    # A recipe stands for its resolved keys, if they are still those of its fields.
    written = flat(source.resolved)
    if _recipe_of(source.name, written, {}) != source:
        raise BadInput(
            "this recipe was changed after it was read; use recipe(old, batch={…}) for a changed "
            "copy"
        )
    return _recipe_of(source.name, written, typed)


def find_recipe(source: str | None, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a run's recipe, and its content as {"group.key": value}.

    Args:
        source: a packaged name, the path of a YAML file, or a task's ``file.py:Name``, or
            ``file.py``. None: the defaults for the task in ``given``.
        given: keys that override the recipe. The task of ``source`` is added to them; without a
            name as ``file.py:``.

    Raises:
        BadInput: there is no such recipe or task.
    """
    # A task in place of a recipe is a key. Without ":Name", it is the file's only task.
    if source is not None and re.search(r"\.py(:\w*)?$", source):
        if given.setdefault("task.name", source) != source:
            raise BadInput(f"two tasks given, {source!r} and {given['task.name']!r}; give one")
        source = None
    if str(given.get("task.name")).endswith(".py"):
        given["task.name"] += ":"

    if source is not None:
        return load(source)
    if given.get("task.name"):
        return name_after(given["task.name"]), {}

    # There is nothing to train.
    known = ", ".join(packaged())
    raise BadInput(
        f"no recipe given; use a packaged one ({known}), a YAML file, or a task (my_task.py:MyTask)"
    )


def name_after(task: Any) -> str:
    """Return ``my_task`` for ``my_task.py:MyTask`` and ``my_task.MyTask``.

    For a notebook's class, return its own name.
    """
    file, colon, _ = str(task).rpartition(":")
    if colon:
        return Path(file).stem
    module, _, name = str(task).rpartition(".")
    return name if module in ("", "__main__") else module.rpartition(".")[2]


def load(source: str) -> tuple[str, dict[str, Any]]:
    """Return the recipe's name, and its content as {"group.key": value}.

    Args:
        source: a packaged name, or the path of a YAML file.

    Raises:
        BadInput: it cannot be read.
    """
    path = Path(source)
    if source in packaged():
        path = RECIPES / f"{source}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        _reject_name(source)
    try:
        content = parsed_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise BadInput(f"recipe {source!r} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"recipe {source!r} is not valid YAML: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise BadInput(
            f"recipe {source!r} must hold keys and values (batch: {{size: 64}}), found {content!r}"
        )
    return path.stem, flat(content)


def _reject_name(source: str) -> NoReturn:
    """Raise BadInput: a name without the suffix of YAML was meant as that of a packaged recipe."""
    known = ", ".join(packaged())
    if source in CHOICES["task"]:
        raise BadInput(
            f"{source!r} is a task, not a recipe ({known}); write RECIPE --task {source}"
        )
    if not known:
        raise BadInput(
            f"recipe {source!r} is unknown, because {missing('a packaged task')}; use a YAML file "
            "or a task (my_task.py:MyTask), or install oneloop again"
        )
    raise BadInput(
        f"recipe {source!r} is unknown; use {known} or a YAML file{suggestion(source, packaged())}"
    )


def flat(content: Mapping[Any, Any]) -> dict[str, Any]:
    """Flatten keys by group to {"group.key": value}. Raise BadInput if a key is given twice."""
    made: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and key in GROUPS:
            more = flattened({key: value})
        else:
            more = {long(str(key)): value}
        twice = made.keys() & more.keys()
        if twice:
            raise BadInput(f"{', '.join(sorted(twice))} is given twice; give it once")
        made |= more
    return made


def long(key: str) -> str:
    """Return ``task.name`` for ``task``, the same for optimizer and schedule; other keys as is."""
    return f"{key}.name" if key in CHOICES else key


def from_python(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys by group, given in Python, as flat plain data.

    Raise BadInput for an unknown class, and for values that JSON cannot hold.
    """
    given = {}
    for key, value in flat(groups).items():
        try:
            given[key] = json.loads(json.dumps(value, default=_plain))
        except TypeError:
            raise BadInput(
                f"{key} is given {value!r}; give text, numbers, lists or dicts of them"
            ) from None
    return given


def _plain(value: Any) -> Any:
    """Return what JSON cannot hold as something that it can."""
    if callable(value):
        return path_of(value)
    if isinstance(value, Duration | Path):
        return str(value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a numpy scalar
        return value.item()
    raise TypeError


def _split(argv: Sequence[str]) -> tuple[str | None, dict[str, Any], set[str]]:
    """Split a command line into recipe, {key: text, or ... without a value}, and flags."""
    source: str | None = None
    typed: dict[str, Any] = {}
    flags: set[str] = set()
    words = list(argv)

    # A key takes the next word as its value, unless that is a key.
    while words:
        word = words.pop(0)
        if word in ("-h", "--help", "--print_config"):
            flags.add({"-h": "help"}.get(word, word[2:]))
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            typed[long(key)] = value if equals else ...
            if not equals and words and not words[0].startswith("--"):
                typed[long(key)] = words.pop(0)
        elif source is None:
            source = word
        else:
            raise BadInput(
                f"two recipes given, {source!r} and {word!r}; give one (values follow a --key)"
            )
    return source, typed, flags


def _choose(
    written: dict[str, Any], typed: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the names of task, optimizer and schedule by group, and the file's keys.

    A newly typed name drops the file's options for the old one.
    """
    chosen = {}

    # What is typed goes before the file, and that before the default.
    for group in CHOICES:
        common = {f"{group}.{field.name}" for field in fields(GROUPS[group])}
        old = written.get(f"{group}.name", GROUPS[group]().name)
        new = typed.get(f"{group}.name", old)
        if not isinstance(new, str):
            raise BadInput(f"{group}.name must be a name or a class path")
        if new != old:
            options = [key for key in written if key.startswith(f"{group}.") and key not in common]
            written = _without(written, options)
        chosen[group] = new
    return chosen, written


def _without(written: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in written.items() if key not in keys}


def _check_without_imports(written: dict[str, Any], typed: Mapping[str, Any]) -> None:
    chosen, written = _choose(written, typed)
    given = written | dict(typed)
    common = types_of(common_parser())
    known = set(common)

    # An own class has to be imported to know its keys, and what other names may mean there.
    imported = set()
    for group, name in chosen.items():
        if name in CHOICES[group]:
            known |= set(_PACKAGED_KEYS[group][name])
        else:
            split_path(group, f"{name}Name" if name.endswith(":") else name)
            imported.add(group)
    for key in given:
        group = key.partition(".")[0]
        if not imported or group in GROUPS.keys() - imported:
            _reject_unknown([key], known)

    # Check the values of the keys that belong to oneloop.
    early = {key: value for key, value in given.items() if key in common}
    _parsed(common_parser(), early, defaults=False)


def _parser_of(
    written: dict[str, Any], typed: dict[str, Any]
) -> tuple[ArgumentParser, dict[str, str], dict[str, Any]]:
    """Return the parser of all keys, the names of :func:`_choose`, and the file's keys."""
    if str(typed.get("task.name")).endswith(".py:"):
        typed["task.name"] = only_task(typed["task.name"])
    chosen, written = _choose(written, typed)
    return parser(**chosen), chosen, written


def _recipe_of(name: str, written: dict[str, Any], typed: dict[str, Any]) -> Recipe:
    """Return the recipe of a file's and the typed keys. Raise BadInput."""
    all_keys, chosen, written = _parser_of(written, typed)

    # Drop the file's keys that typed keys make useless, and parse again.
    defaults = {action.dest: action.default for action in all_keys._actions}
    needs = getattr(resolve("task", chosen["task"]), "needs", {})
    while True:
        values = _parsed(all_keys, written | typed)
        # It is already validated.
        text = all_keys.dump(values, format="json", skip_unset=False, skip_validation=True)
        resolved = json.loads(text)
        reject_out_of_range(flat(resolved))
        idle = without_effect(flat(resolved), defaults, typed, needs)
        if not idle & written.keys():
            return Recipe(
                name=name,
                seed=values.seed,
                duration=values.duration,
                track=values.track,
                resolved=resolved,
                **_groups(values),
            )
        written = _without(written, idle)


def _parsed(made: ArgumentParser, given: Mapping[str, Any], *, defaults: bool = True) -> Namespace:
    kinds = types_of(made)
    _reject_unknown(given, kinds)
    words = [f"--{key}={_text(key, value, kinds[key])}" for key, value in given.items()]
    try:
        return made.parse_args(words, defaults=defaults)
    except Exception as error:  # jsonargparse raises many types; each message names the key
        raise BadInput(_reworded(error, given, kinds)) from error


def _text(key: str, value: Any, kind: Any) -> str:
    """Return a value as jsonargparse reads it."""
    if value is ...:
        if kind is not bool:
            raise BadInput(f"{key} needs a value: --{key} VALUE")
        return "true"
    if key == "track" and value in ("none", ""):
        return "[]"
    if not isinstance(value, str):
        return json.dumps(value)
    takes_only_lists = re.fullmatch(r"\[.*\](\|null)?", shown(kind))
    if takes_only_lists and not value.startswith(("[", "null")):
        return f"[{value}]"
    return value


def _reject_unknown(given: Iterable[str], known: Collection[str]) -> None:
    for key in given:
        if key in GROUPS:
            inside = sorted(name for name in known if name.startswith(f"{key}."))
            raise BadInput(
                f"{key} is a group of keys and has no value; its keys: {', '.join(inside)}"
            )
        if key not in known:
            near = suggestion(key, known)
            raise BadInput(f"unknown key {key!r}{near or '; --help lists all keys'}")


def _reworded(error: Exception, given: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """Return a message for a parser error; for a wrong type, name the expected type."""
    match = re.match(r'Parser key "([^"]+)":', str(error))
    key = match[1] if match else ""
    expected = described(kinds.get(key))
    if key in given and expected:
        value = given[key]
        text = value if isinstance(value, str) else json.dumps(value)
        return f"{key} must be {expected}, got {text}"

    # Keep other messages, in plainer words.
    text = re.sub(r'Parser key "([^"]+)":', r"\1:", one_line(error))
    return re.sub("<class '(.+?)'>", r"\1", text)


def _groups(values: Namespace) -> dict[str, Any]:
    """Return an object of each group's class, by group."""
    groups: dict[str, Any] = {}
    for group, kind in GROUPS.items():
        of_group = values[group].as_dict()
        if group == "init":
            of_group["source"] = of_group.pop("from")  # which Python reserves
        if group == "optimizer":
            rules = of_group["groups"]
            of_group["groups"] = {name: ParametersConfig(**rules[name]) for name in rules}

        # Keys that are not fields of the class are options of the chosen object.
        common = {field.name for field in fields(kind)}
        options = {key: of_group.pop(key) for key in list(of_group) if key not in common}
        if "options" in common:
            of_group["options"] = options
        groups[group] = kind(**of_group)
    return groups
