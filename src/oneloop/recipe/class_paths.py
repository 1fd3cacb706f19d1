"""Resolve short names and class paths to classes and functions."""

import ast
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from oneloop.basics import houses
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.extras import how_to_install
from oneloop.recipe.expected import EXPECTED, MISFITS, OPTIONS

# Class paths of the short names for ``task.name``, ``optimizer.name`` and ``schedule.name``.
CHOICES: dict[str, dict[str, str]] = {
    "task": {name: f"oneloop.tasks.{name}.{kind}" for name, kind in houses.TASKS.items()},
    "optimizer": {name: f"oneloop.optim.optimizers.{name}" for name in OPTIONS["optimizer"]},
    "schedule": {name: f"oneloop.optim.schedule.{name}" for name in OPTIONS["schedule"]},
}

_IMPORTING: list[str] = []  # modules and files that are being imported
_IMPORTED_FILES: dict[Path, tuple[int, int]] = {}  # mtime and size of imported files


def resolve(group: str, name: str) -> Callable[..., Any]:
    """Return the class or function of a name.

    Args:
        group: ``task``, ``optimizer`` or ``schedule``.
        name: a short name, ``file.py:Name`` or ``module.Name``.

    Raises:
        BadInput: there is none, or it is of another kind.
    """
    path, attribute = _split(group, name)
    if path.startswith("oneloop.tasks."):
        houses.module_of("a packaged task")

    # Import the file or module. Each error says what the user can do.
    try:
        with _importing(path):
            if ":" not in name:
                _add_current_folder()
            module = module_of(Path(path)) if ":" in name else import_module(path)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{group}.name {name!r} needs the module {error.name or str(error)!r}, which is not "
            "installed and not found from this folder; install it or correct the path"
            f"{how_to_install(error)}"
        ) from error
    except BadInput as error:
        if ":" not in name:
            raise BadInput(str(error)) from error
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

    if not hasattr(module, attribute):
        if path == "__main__":
            raise BadInput(
                f"{group}.name {name!r} was defined in a notebook, and is gone; put it into a "
                f"file, and name that: my_file.py:{attribute} (of a run that has ended: --task "
                f"my_file.py:{attribute})"
            )
        raise BadInput(f"{group}.name {name!r}: {path!r} has no {attribute!r}{_has(module)}")

    # A name can lead to any object.
    chosen = getattr(module, attribute)
    if name not in CHOICES[group]:
        wrong = MISFITS[group](chosen)
        if wrong:
            raise BadInput(f"{group}.name {name!r} {wrong}; expected {EXPECTED[group]}")
    return chosen  # type: ignore[no-any-return]


@contextmanager
def _importing(path: str) -> Iterator[None]:
    _IMPORTING.append(path)
    try:
        yield
    finally:
        _IMPORTING.pop()


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


def _split(group: str, name: str) -> tuple[str, str]:
    """Split a name into file or module, and attribute.

    Raise BadInput for other forms, for a file that does not exist, and for the standard library.
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
        from oneloop.recipe.synonyms import instead, suggestion

        if sentence := instead(f"{group}.{name}"):
            raise BadInput(f"{group}.name {name!r} is unknown: {sentence}")
        raise BadInput(
            f"{group}.name {name!r} is unknown; use {', '.join(known)}, or give the path of your "
            f"own (my_file.py:Name or module.Name){suggestion(name, known)}"
        )
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise BadInput(
            f"{group}.name {name!r} is in Python's standard library; expected {EXPECTED[group]}"
        )
    return module, attribute


def only_task(file: str) -> str:
    """Return ``file.py:Name`` for the only task of a file, which is not imported.

    A task is a class that defines ``model``, and ``loss`` or ``batch_loss``, itself or in a base
    class: of the file or of oneloop.tasks. Raise BadInput for none or several.
    """
    # Read the file. It is imported later, and only if it is chosen.
    file = file.removesuffix(":")
    tree = _read(Path(file))

    # Find the members of each class: those of its base classes, and its own.
    packaged = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("oneloop.tasks."):
            packaged |= {alias.asname or alias.name for alias in node.names}
    packaged.discard("Task")
    members = {name: {"model", "loss"} for name in packaged}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = set()
            for one in node.body:
                if isinstance(one, ast.FunctionDef):
                    own.add(one.name)
                elif isinstance(one, ast.Assign):  # loss = a function
                    own |= set(map(ast.unparse, one.targets))
            for base in node.bases:
                own |= members.get(ast.unparse(base), set())
            members[node.name] = own

    # Choose the classes that have a model and a loss.
    names = []
    for name, own in members.items():
        if name not in packaged and "model" in own and own & {"loss", "batch_loss"}:
            names.append(name)
    if len(names) != 1:
        found = "no class with model() and loss() or batch_loss()"
        if names:
            found = f"{len(names)} tasks ({', '.join(names)})"
        example = [*names, "MyTask"][0]
        raise BadInput(
            f"expected one task in the file that task.name gives: {file!r} has {found}; name the "
            f"class: {file}:{example}"
        )
    return f"{file}:{names[0]}"


def _read(file: Path) -> ast.Module:
    try:
        return ast.parse(file.expanduser().read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"task.name {str(file)!r} cannot be read: {reason}") from error


def arguments(task: str) -> set[str] | None:
    """Return the names of a task's arguments, and maybe more, without an import.

    Return None if its file does not show them.
    """
    module, name = _split("task", task)
    packaged = module.startswith("oneloop.tasks.")

    # Read the file. A module of the user's would have to be imported to find its file.
    if packaged:
        file = Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"
    elif ":" in task:
        file = Path(module)
    else:
        return None
    try:
        tree = _read(file)
    except BadInput:
        return None

    # Take the arguments of __init__.
    for kind, start in _constructors(tree, name):
        found = {one.arg for one in (*start.args.args[1:], *start.args.kwonlyargs)}
        if not start.args.kwarg:
            return found
        if not packaged:
            return None
        # The base classes get the other arguments.
        for base in map(ast.unparse, kind.bases):
            found |= arguments(f"{_imported_from(tree, base)}.{base}") or set()
        return found
    return None


def _constructors(tree: ast.Module, name: str) -> Iterator[tuple[ast.ClassDef, ast.FunctionDef]]:
    """Yield the class of this name, and its ``__init__``, if it has one."""
    for kind in tree.body:
        if isinstance(kind, ast.ClassDef) and kind.name == name:
            for member in kind.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    yield kind, member


def _imported_from(tree: ast.Module, name: str) -> str | None:
    """Return the module from which a file imports a name. Raise KeyError if it does not."""
    imported = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                imported[one.name] = node.module
    return imported[name]


def source(group: str, name: str) -> Path | None:
    """Return the file of a name, without an import.

    Return None for a short name, and for a class of a notebook.
    """
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
    if not hasattr(sys.modules.get(module), name):
        raise BadInput(
            f"{module!r} has no {name!r}, so a resume could not find {chosen!r}; assign the class "
            f"to this name there: {name} = …"
        )
    if getattr(sys.modules.get(module), name) is not chosen:
        raise BadInput(
            f"{module}.{name} now refers to a different object than {chosen!r}; rename your class"
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


def from_there(name: str, recorded: Path) -> str:
    """Return a name by which :func:`resolve` finds a class of an earlier run.

    Args:
        name: by which that run found it.
        recorded: the file of the class at that time, which may not exist any more.
    """
    if not recorded.is_file() or recorded.suffix != ".py":
        return name
    if ":" in name:
        return f"{recorded}:{name.rpartition(':')[2]}"
    root = str(recorded.parent.parent if recorded.name == "__init__.py" else recorded.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return name


def module_of(file: Path) -> ModuleType:
    """Import a file as a script next to it would.

    Raise BadInput if its module name is taken.
    """
    file = file.expanduser().resolve()

    # Do not import a file twice: its classes would differ.
    for name in ("__main__", file.stem):
        there = getattr(sys.modules.get(name), "__file__", None)
        if there and Path(there).resolve() == file:
            return _reloaded(sys.modules[name], file)

    # Its name must lead to this file only.
    name = file.stem
    if "." in name:
        raise BadInput(f"a module's name holds no dot; give {file.name} another name")
    if name in sys.stdlib_module_names:
        raise BadInput(f"the module {name!r} is of Python itself; give {file.name} another name")
    found = find_spec(name)
    if found is not None and found.origin and Path(found.origin).resolve() != file:
        raise BadInput(f"the module {name!r} is {found.origin}; give {file.name} another name")

    # Files next to it become importable, too.
    sys.path.insert(0, str(file.parent))
    _IMPORTED_FILES[file] = file.stat().st_mtime_ns, file.stat().st_size
    return import_module(name)


def _reloaded(module: ModuleType, file: Path) -> ModuleType:
    """Reload the module if its file has changed.

    In a notebook, users edit files between two runs.
    """
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
