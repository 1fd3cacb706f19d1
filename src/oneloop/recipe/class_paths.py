"""Resolve short names and class paths to classes and functions."""

import ast
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.synonyms import suggestion

_TASKS = {"image_classification": "ImageClassification", "causal_lm": "CausalLM", "sft": "SFT"}
_TASKS |= {"text_classification": "TextClassification", "text_regression": "TextRegression"}
_TASKS |= {"token_classification": "TokenClassification", "text_pairs": "TextPairs"}
# Class paths of the short names for ``task.name``, ``optimizer.name`` and ``schedule.name``.
CHOICES: dict[str, dict[str, str]] = {
    "task": {name: f"oneloop.tasks.{name}.{kind}" for name, kind in _TASKS.items()},
    "optimizer": {
        name: f"oneloop.optim.optimizers.{name}" for name in ("adamw", "sgd", "muon", "adafactor")
    },
    "schedule": {
        name: f"oneloop.optim.schedule.{name}"
        for name in ("constant", "linear", "cosine", "wsd", "plateau")
    },
}


_IMPORTING: list[str] = []  # modules and files that are being imported
_IMPORTED_FILES: dict[Path, tuple[int, int]] = {}  # mtime and size of imported files


def resolve(group: str, name: str) -> Callable[..., Any]:
    """Return the class or function of a short name or dotted path. Raise BadInput if there is
    none."""
    known = CHOICES[group]
    path, attribute = _split(group, name)
    try:
        with _importing(path):
            if ":" not in name:
                _add_current_folder()
            module = module_of(Path(path)) if ":" in name else import_module(path)
        chosen = getattr(module, attribute)
    except ModuleNotFoundError as error:
        lacks = (
            f"needs the module {error.name!r}, which is not installed and not found from this "
            "folder"
        )
        raise BadInput(
            f"{group}.name {name!r} {lacks}; install it or correct the path{_extra(error.name)}"
        ) from error
    except AttributeError:
        if path == "__main__":
            file = f"my_file.py:{attribute}"
            where = (
                f"put it into a file, and name that: {file} (of a run that has ended: --task "
                f"{file})"
            )
            raise BadInput(
                f"{group}.name {name!r} was defined in a notebook, and is gone; {where}"
            ) from None
        raise BadInput(
            f"{group}.name {name!r}: {path!r} has no {attribute!r}{_has(module)}"
        ) from None
    except BadInput as error:
        raise BadInput(f"{group}.name {name!r}: {error}" if ":" in name else str(error)) from error
    except SystemExit:
        why = f"{path!r} calls sys.exit when it is imported"
        raise BadInput(
            f'{group}.name {name!r}: {why}; put that under if __name__ == "__main__":'
        ) from None
    except Exception as error:
        raise BadInput(
            f"{group}.name {name!r}: importing {path!r} failed: {type(error).__name__}: {error}"
        ) from error
    if wrong := "" if name in known else _FITS[group](chosen):
        raise BadInput(f"{group}.name {name!r} {wrong}; expected {_WANTED[group]}")
    return chosen  # type: ignore[no-any-return]


@contextmanager
def _importing(path: str) -> Iterator[None]:
    _IMPORTING.append(path)
    try:
        yield
    finally:
        _IMPORTING.pop()


def reject_while_importing() -> None:
    """Raise BadInput if a class is being imported from a script, which must not train meanwhile."""
    if _IMPORTING:
        advice = 'put the call under if __name__ == "__main__":'
        raise BadInput(
            f"fit is called while {_IMPORTING[-1]} is imported for a class in it; {advice}"
        )


def _split(group: str, name: str) -> tuple[str, str]:
    """Split a name into file or module, and attribute. Raise BadInput for other forms, and for the
    standard library."""
    known = CHOICES[group]
    if ":" in name or name.endswith(".py"):
        file, _, attribute = name.rpartition(":") if ":" in name else (name, "", "")
        if not attribute.isidentifier() or not file.endswith(".py"):
            raise BadInput(
                f"{group}.name {name!r}: write the file and the name in it: "
                f"{file or 'my_file.py'}:Name"
            )
        return file, attribute
    module, _, attribute = known.get(name, name).rpartition(".")
    if not module:
        own = "or give the path of your own (my_file.py:Name or module.Name)"
        raise BadInput(
            f"{group}.name {name!r} is unknown; use {', '.join(known)}, "
            f"{own}{suggestion(name, known)}"
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise BadInput(
            f"{group}.name {name!r} is in Python's standard library; expected {_WANTED[group]}"
        )
    return module, attribute


def only_task(file: str) -> str:
    """Return ``file.py:Name`` for the only task of a file, which is not imported. Raise BadInput
    for none or several.

    A task is a class that defines ``model`` and ``loss``, itself or in a base class: of the file or
    of oneloop.tasks.
    """
    file = file.removesuffix(":")
    tree = _read(Path(file))
    packaged = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("oneloop.tasks.")
        for alias in node.names
    } - {"Task"}
    members = {name: {"model", "loss"} for name in packaged}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
            members[node.name] = own.union(
                *(members.get(ast.unparse(base), set()) for base in node.bases)
            )
    names = [
        name for name in members if name not in packaged and {"model", "loss"} <= members[name]
    ]
    if len(names) != 1:
        found = (
            f"has {len(names)} tasks ({', '.join(names)})"
            if names
            else "has no class with model() and loss()"
        )
        raise BadInput(
            f"task.name {file!r} {found}; name the class: {file}:{names[0] if names else 'MyTask'}"
        )
    return f"{file}:{names[0]}"


def _read(file: Path) -> ast.Module:
    try:
        return ast.parse(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        raise BadInput(
            f"task.name {f'{file}'!r} cannot be read: {getattr(error, 'strerror', 0) or error}"
        ) from error


def arguments(task: str) -> set[str] | None:
    """Return the names of a task's arguments, and maybe more, without an import; None: its file
    does not show them."""
    module, name = _split("task", task)
    packaged = module.startswith("oneloop.tasks.")
    if not packaged and ":" not in task:
        return None
    try:
        tree = _read(
            Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"
            if packaged
            else Path(module)
        )
    except BadInput:
        return None
    imported = {
        one.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for one in node.names
    }
    for kind in (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    ):
        for start in (
            node
            for node in kind.body
            if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        ):
            if start.args.kwarg and not packaged:
                return None
            found = {one.arg for one in (*start.args.args[1:], *start.args.kwonlyargs)}
            # which gets the other arguments
            for base in map(ast.unparse, kind.bases if start.args.kwarg else ()):
                found |= arguments(f"{imported[base]}.{base}") or set()
            return found
    return None


def source(group: str, name: str) -> Path | None:
    """Return the file of a name, without an import; None for a short name, or a class of a
    notebook."""
    if name in CHOICES[group]:
        return None
    if ":" in name:
        return Path(name.rpartition(":")[0]).expanduser().resolve()
    top = name.partition(".")[0]
    _add_current_folder()
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        found = None
    return Path(found.origin) if found is not None and found.origin else None


def path_of(chosen: Any) -> str:
    """Return the name by which :func:`resolve` finds a class or function: ``file.py:Name`` if it is
    of the running script, ``__main__.Name`` of a notebook, else ``module.Name``. Raise BadInput if
    there is none."""
    name, module = getattr(chosen, "__qualname__", ""), getattr(chosen, "__module__", "")
    if not module or not name.isidentifier():
        raise BadInput(
            f"{chosen!r} cannot be found by its name; define it outside of any function or class"
        )
    main = sys.modules["__main__"]
    if getattr(sys.modules.get(module), name, None) is not chosen:
        raise BadInput(
            f"{module}.{name} now refers to a different object than {chosen!r}; rename your class"
        )
    if (
        module == "__main__"
        and (spec := getattr(main, "__spec__", None)) is not None
        and "." in spec.name
    ):
        return f"{spec.name}.{name}"  # python -m package.module
    file = getattr(main, "__file__", None) if module == "__main__" else None
    return f"{file}:{name}" if file else f"{module}.{name}"


def same_object(old: str, new: str) -> bool:
    """Return whether two names may mean the same object: ``my_task.py:T``, in any folder, and
    ``my_task.T``."""
    return old == new if ":" not in f"{old}{new}" else _last_two(old) == _last_two(new)


def _last_two(name: str) -> list[str]:
    file, _, attribute = name.rpartition(":")
    return [Path(file).stem, attribute] if file else name.split(".")[-2:]


def from_there(name: str, recorded: Path) -> str:
    """Return a name by which :func:`resolve` finds the class in the file ``recorded``, if that file
    still exists."""
    if not recorded.is_file() or recorded.suffix != ".py":
        return name
    if ":" in name:
        return f"{recorded}:{name.rpartition(':')[2]}"
    root = str(recorded.parent.parent if recorded.name == "__init__.py" else recorded.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return name


def module_of(file: Path) -> ModuleType:
    """Import a file as a script next to it would. Raise BadInput if it is missing, or its module
    name is taken."""
    file = file.expanduser().resolve()
    if not file.is_file():
        raise BadInput(f"file {file} does not exist")
    for name in ("__main__", file.stem):
        there = getattr(sys.modules.get(name), "__file__", None)
        if there and Path(there).resolve() == file:
            return _reloaded(sys.modules[name], file)
    name = file.stem
    taken = name in sys.stdlib_module_names
    found = None if taken or "." in name else find_spec(name)
    if "." in name:
        raise BadInput(f"a module's name holds no dot; give {file.name} another name")
    if taken or (found is not None and found.origin and Path(found.origin).resolve() != file):
        there = found.origin if found else "of Python itself"
        raise BadInput(f"the module {name!r} is {there}; give {file.name} another name")
    sys.path.insert(0, str(file.parent))
    _IMPORTED_FILES[file] = file.stat().st_mtime_ns, file.stat().st_size
    return import_module(name)


def _reloaded(module: ModuleType, file: Path) -> ModuleType:
    """Reload the module if its file has changed; in a notebook, users edit files between two
    runs."""
    now = file.stat().st_mtime_ns, file.stat().st_size
    if _IMPORTED_FILES.setdefault(file, now) != now and module.__name__ != "__main__":
        _IMPORTED_FILES[file] = now
        return reload(module)
    return module


def _add_current_folder() -> None:
    """Make modules of the current folder importable, as ``python -m`` does."""
    if os.getcwd() not in sys.path and not getattr(sys.flags, "safe_path", False):
        sys.path.append(os.getcwd())


def _has(module: ModuleType) -> str:
    own = [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    ]
    return f"; it has {', '.join(own[:8])}" if own else ""


def _task_like(chosen: Any) -> str:
    members = ("model", "train_set", "eval_sets", "collate", "weight", "loss")
    if not isinstance(chosen, type):
        return f"is a {type(chosen).__name__}, not a class"
    lacks = [member for member in members if not callable(getattr(chosen, member, None))]
    return f"is a class that lacks {', '.join(lacks)}" if len(lacks) > 3 else ""


def _optimizer_like(chosen: Any) -> str:
    if isinstance(chosen, type):
        parents = [f"{parent.__module__}.{parent.__name__}" for parent in chosen.__mro__]
        return (
            ""
            if "torch.optim.optimizer.Optimizer" in parents
            else "is a class, but not a torch.optim.Optimizer"
        )
    takes = _parameters(chosen)
    if takes is None:
        return f"is a {type(chosen).__name__}, neither a class nor a function"
    accepted = {"params", "lr"} <= takes.keys()
    return (
        "" if accepted else f"is a function of ({', '.join(takes)}), and not of (params, *, lr, …)"
    )


def _schedule_like(chosen: Any) -> str:
    takes = _parameters(chosen)
    if takes is None:
        return f"is a {type(chosen).__name__}, not a function"
    needed = [
        parameter
        for parameter in takes.values()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return (
        ""
        if len(needed) == 2
        else f"is a function of ({', '.join(takes)}), and not of two arguments"
    )


def _parameters(chosen: Any) -> Mapping[str, inspect.Parameter] | None:
    return inspect.signature(chosen).parameters if inspect.isfunction(chosen) else None


_FITS: dict[str, Callable[[Any], str]] = {
    "task": _task_like,
    "optimizer": _optimizer_like,
    "schedule": _schedule_like,
}
"""checks before a resolved object is called, since a name can lead to any function of any
package"""
_WANTED = {
    "task": "a class with the members of oneloop.tasks.protocol.Task",
    "optimizer": "a torch.optim.Optimizer, or a function (params, *, lr, …) that returns one",
    "schedule": "a function (step, total) -> factor",
}


def _extra(module: str | None) -> str:
    packages = {
        "sklearn": "scikit-learn",
        "torchvision": "torchvision",
        "transformers": "transformers",
    }
    return f" (pip install {packages[module]})" if module in packages else ""
