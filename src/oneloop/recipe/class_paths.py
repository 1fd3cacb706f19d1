"""Resolve short names and class paths to classes and functions; names of recipes."""

import inspect
import os
import sys
from collections.abc import Callable
from importlib import import_module, reload
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from oneloop.basics import houses
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.extras import how_to_install
from oneloop.recipe.synonyms import GONE, suggestion

RECIPES = Path(__file__).parents[1] / "tasks" / "recipes"
_OPTIMIZERS = ("adamw", "sgd", "muon")
_SCHEDULES = ("constant", "linear", "cosine", "wsd", "plateau")
# Class paths of the short names for ``task.name``, ``optimizer.name`` and ``schedule.name``.
CHOICES: dict[str, dict[str, str]] = {
    "task": {name: f"oneloop.tasks.{name}.{kind}" for name, kind in houses.TASKS.items()},
    "optimizer": {name: f"oneloop.optim.optimizers.{name}" for name in _OPTIMIZERS},
    "schedule": {name: f"oneloop.optim.schedule.{name}" for name in _SCHEDULES},
}
EXPECTED = {
    "task": "a class with the members of oneloop.task_protocol.protocol.Task",
    "optimizer": "a torch.optim.Optimizer, or a function (params, *, lr, …) that returns one",
    "schedule": "a function (step, total) -> factor, a class of torch.optim.lr_scheduler, or a "
    "function (optimizer, …) that returns one",
}
_PARENTS = {
    "optimizer": "torch.optim.optimizer.Optimizer",
    "schedule": "torch.optim.lr_scheduler.LRScheduler",
}
_MEMBERS = ("model", "train_set", "eval_sets", "collate", "weight", "loss")  # of a task

_IMPORTING: list[str] = []  # modules and files that are being imported
_CHANGED: dict[Path, int] = {}  # times of change of imported files


def packaged() -> list[str]:
    """Return the names of the packaged recipes; none if oneloop/tasks was deleted."""
    return sorted(file.stem for file in RECIPES.glob("*.yaml"))


def resolve(group: str, name: str) -> Callable[..., Any]:
    """Return the class or function of a name.

    Args:
        group: ``task``, ``optimizer`` or ``schedule``.
        name: a short name, ``file.py:Name`` or ``module.Name``.

    Raises:
        BadInput: there is none, or it is of another kind.
    """
    path, attribute = split_path(group, name)
    module = _imported(group, name, path)
    if not hasattr(module, attribute):
        if path == "__main__":
            raise BadInput(
                f"{group}.name {name!r} was defined in a notebook, and is gone; put it into a "
                f"file, and name that: my_file.py:{attribute} (of a run that has ended: --task "
                f"my_file.py:{attribute})"
            )
        defined = ", ".join(_defined_in(module)[:8])
        raise BadInput(
            f"{group}.name {name!r}: {path!r} has no {attribute!r}; it has {defined or 'no class'}"
        )

    # A name can lead to any object.
    chosen = getattr(module, attribute)
    if name not in CHOICES[group]:
        _reject_misfit(group, name, chosen)
    return chosen  # type: ignore[no-any-return]


def _imported(group: str, name: str, path: str) -> ModuleType:
    """Import a file or module. Each error says what the user can do."""
    if path.startswith("oneloop.tasks."):
        houses.module_of("a packaged task")
    _IMPORTING.append(path)
    try:
        if path.endswith(".py"):
            return module_of(Path(path))
        _add_current_folder()
        return import_module(path)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{group}.name {name!r} needs the module {error.name or str(error)!r}, which is not "
            "installed and not found from this folder; install it or correct the path"
            f"{how_to_install(error)}"
        ) from error
    except BadInput as error:
        raise BadInput(f"{group}.name {name!r}: {error}") from error
    except SystemExit:
        raise BadInput(
            f"{group}.name {name!r}: {path!r} calls sys.exit when it is imported; put that under "
            'if __name__ == "__main__":'
        ) from None
    except Exception as error:
        raise BadInput(
            f"{group}.name {name!r}: importing {path!r} failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        _IMPORTING.pop()


def _defined_in(module: ModuleType) -> list[str]:
    """Return the names of what a module defines itself."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]


def _reject_misfit(group: str, name: str, chosen: Any) -> None:
    """Raise BadInput if an object cannot be the task, optimizer or schedule, before it is called.

    Classes are compared by name, since this package does not import torch.
    """
    parents = [f"{kind.__module__}.{kind.__name__}" for kind in getattr(chosen, "__mro__", ())]
    arguments = inspect.signature(chosen).parameters if inspect.isfunction(chosen) else {}
    fits = {"params", "lr"} <= arguments.keys()
    if group == "schedule":
        required = [one for one in arguments.values() if one.default is one.empty]
        fits = "optimizer" in arguments or len(required) == 2
    wrong = ""
    if group == "task":
        lacks = [member for member in _MEMBERS if not callable(getattr(chosen, member, None))]
        if not parents:
            wrong = f"is a {type(chosen).__name__}, not a class"
        elif len(lacks) > 3:  # later checks name fewer missing members
            wrong = f"is a class that lacks {', '.join(lacks)}"
    elif parents:
        if _PARENTS[group] not in parents:
            wrong = f"is a class, but not a {_PARENTS[group]}"
        elif "torch.optim.lr_scheduler.ReduceLROnPlateau" in parents:
            wrong = "needs results of evaluations; use schedule.name plateau"
    elif not fits:
        wrong = f"is a {type(chosen).__name__} with the arguments ({', '.join(arguments)})"
    if wrong:
        raise BadInput(
            f"{group}.name {name!r} cannot be used as the {group} of a run: it {wrong}; expected "
            f"{EXPECTED[group]}"
        )


def reject_while_importing() -> None:
    """Raise BadInput if a script is being imported, which must not train meanwhile.

    This process imports it for a class in it, or because it is a spawned child.
    """
    from multiprocessing import current_process

    if getattr(current_process(), "_inheriting", False):
        raise BadInput(
            "fit is called while a new process imports the script; put the call under "
            'if __name__ == "__main__":, or set machine.workers 0'
        )
    if _IMPORTING:
        raise BadInput(
            f"fit is called while {_IMPORTING[-1]} is imported for a class in it; put the call "
            'under if __name__ == "__main__":'
        )


def split_path(group: str, name: str) -> tuple[str, str]:
    """Split a name into file or module, and attribute.

    Raise BadInput for other forms, and for a file that does not exist.
    """
    known = CHOICES[group]

    # A file, and a name in it.
    if ":" in name or name.endswith(".py"):
        file = name
        attribute = ""
        if ":" in name:
            file, _, attribute = name.rpartition(":")
        if not attribute.isidentifier() or not file.endswith(".py"):
            raise BadInput(
                f"{group}.name {name!r}: write the file and the name in it: "
                f"{file or 'my_file.py'}:Name"
            )
        if not Path(file).expanduser().is_file():
            raise BadInput(
                f"{group}.name {name!r}: file {Path(file).expanduser().resolve()} does not exist"
            )
        return file, attribute

    # A short name, or a module and a name in it.
    module, _, attribute = known.get(name, name).rpartition(".")
    if not module:
        if sentence := GONE.get(f"{group}.{name}"):
            raise BadInput(f"{group}.name {name!r} is unknown: {sentence}")
        raise BadInput(
            f"{group}.name {name!r} is unknown; use {', '.join(known)}, or give the path of your "
            f"own (my_file.py:Name or module.Name){suggestion(name, known)}"
        )
    return module, attribute


def only_task(file: str) -> str:
    """Return ``file.py:Name`` for the only task of a file, which is imported.

    A task is a class of the file that has ``model``, and ``loss`` or ``batch_loss``. Raise BadInput
    for none or several.
    """
    file = file.removesuffix(":")
    path, _ = split_path("task", f"{file}:Name")
    module = _imported("task", file, path)
    names = []
    for name in _defined_in(module):
        kind = getattr(module, name)
        has_loss = hasattr(kind, "loss") or hasattr(kind, "batch_loss")
        if isinstance(kind, type) and hasattr(kind, "model") and has_loss:
            names.append(name)
    if len(names) != 1:
        classes = "no class with model() and loss() or batch_loss()"
        if names:
            classes = f"{len(names)} tasks ({', '.join(names)})"
        raise BadInput(
            f"expected one task in the file that task.name gives: {file!r} has {classes}; name the "
            f"class: {file}:{[*names, 'MyTask'][0]}"
        )
    return f"{file}:{names[0]}"


def source(group: str, name: str) -> Path | None:
    """Return the file of a name, without an import.

    Return None for a short name, and for a class of a notebook.
    """
    if name in CHOICES[group]:
        return None
    if ":" in name:
        return Path(name.rpartition(":")[0]).expanduser().resolve()
    _add_current_folder()
    found = PathFinder.find_spec(name.partition(".")[0])
    return Path(found.origin) if found and found.origin else None


def path_of(chosen: Any) -> str:
    """Return the name by which :func:`resolve` finds a class or function.

    It is ``file.py:Name`` for the running script, ``__main__.Name`` for a notebook, else
    ``module.Name``. Raise BadInput if there is none.
    """
    name = getattr(chosen, "__qualname__", "")
    module = getattr(chosen, "__module__", "")
    if not module or not name.isidentifier():
        raise BadInput(
            f"{chosen!r} cannot be found by its name; define it outside of any function or class"
        )
    if getattr(sys.modules.get(module), name, None) is not chosen:
        raise BadInput(
            f"{module}.{name} is not {chosen!r}, so a resume could not find it; assign the class "
            f"to this name, or rename it"
        )
    if module != "__main__":
        return f"{module}.{name}"

    # The class is of the running program.
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and "." in spec.name:  # python -m package.module
        return f"{spec.name}.{name}"
    file = getattr(main, "__file__", None)
    return f"{file}:{name}" if file else f"{module}.{name}"


def module_of(file: Path) -> ModuleType:
    """Import a file as a script next to it would.

    Raise BadInput if its module name is taken.
    """
    file = file.expanduser().resolve()

    # Import a file once, as its classes would differ. In a notebook, users edit it between runs.
    changed = file.stat().st_mtime_ns
    before = _CHANGED.get(file, changed)
    _CHANGED[file] = changed
    for name in ("__main__", file.stem):
        there = getattr(sys.modules.get(name), "__file__", None)
        if there and Path(there).resolve() == file:
            module = sys.modules[name]
            return module if name == "__main__" or changed == before else reload(module)

    # Its name must lead to this file only.
    name = file.stem
    if "." in name or name in sys.stdlib_module_names:
        raise BadInput(
            f"{file.name} cannot be imported: its name holds a second dot, or is that of a module "
            "of Python itself; give it another name"
        )
    found = find_spec(name)
    if found is not None and found.origin and Path(found.origin).resolve() != file:
        raise BadInput(f"the module {name!r} is {found.origin}; give {file.name} another name")

    # Files next to it become importable, too.
    sys.path.insert(0, str(file.parent))
    return import_module(name)


def _add_current_folder() -> None:
    """Make modules of the current folder importable, as ``python -m`` does."""
    if os.getcwd() not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.append(os.getcwd())
