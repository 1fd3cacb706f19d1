"""Load recipes: from a packaged name, a YAML file, a task alone, or keys given in Python."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from oneloop.basics.duration import Duration
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import flattened, one_line
from oneloop.basics.houses import missing
from oneloop.basics.untrusted import parsed_yaml
from oneloop.recipe.class_paths import CHOICES, path_of
from oneloop.recipe.schema import GROUPS
from oneloop.recipe.synonyms import suggestion

RECIPES = Path(__file__).parents[1] / "tasks" / "recipes"


def packaged() -> list[str]:
    """Return the names of the packaged recipes; none if oneloop/tasks was deleted."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


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
