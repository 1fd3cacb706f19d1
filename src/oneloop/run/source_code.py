"""The source of the user's code: is it that of an earlier start, and the same on all hosts?"""

import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import cast

from xxhash import xxh3_64_hexdigest

from oneloop.basics.untrusted import damaged, read_json
from oneloop.checkpoint.saved_state import read_state
from oneloop.checkpoint.store import Store
from oneloop.recipe.class_paths import CHOICES, resolve, source
from oneloop.recipe.schema import Recipe
from oneloop.run.environment import versions

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def sources(task: type) -> dict[str, str]:
    """Return a checksum of the source of the task, and of each module that is not installed.

    The versions of installed packages are compared elsewhere. A module that is imported later, or
    only on some ranks, is not compared.
    """
    found = {"the task": source_of(task).get("checksum", "")}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        if file.startswith(_LIBRARIES) or "-packages/" in file:
            continue
        with suppress(OSError):
            found[f"the module {name}"] = xxh3_64_hexdigest(Path(file).read_bytes())
    return found


def sources_of_model(task: object, modules: Iterable[object]) -> dict[str, str]:
    """Return what identifies the code of a model: checksums of sources, versions of packages.

    The sources are those of the classes of task and modules, and of the modules of :func:`sources`
    whose names they mention. An installed package, also oneloop, counts by its version.

    Args:
        task: an instance.
        modules: all modules of the model; empty: a teacher, whose classes only the task knows.
    """
    own = {name.removeprefix("the module "): one for name, one in sources(type(task)).items()}
    found: dict[str, str] = {}
    names = ["torch", "transformers"]  # what loads a teacher
    for part in (task, *modules):
        for kind in type(part).__mro__:
            names.append(kind.__module__)
            if kind.__module__ == "__main__" and "__main__" not in own:  # a notebook
                found[kind.__name__] = source_of(kind).get("checksum", "")

    # Follow the names. A file counts by its own name: a script is another module when imported.
    for name in names:  # grows
        if name in own and name.partition(".")[0] != "oneloop":
            file = Path(str(sys.modules[name].__file__))
            found[file.name] = found.get(file.name, "") + own.pop(name)
            words = re.findall(r"\w+", file.read_text("latin-1"))
            names += [other for other in sorted(own) if other.rpartition(".")[2] in words]
    return found | versions(sorted({name.partition(".")[0] for name in names}))


def another_file(recipe: Recipe, run: Path) -> str:
    """Return the end of a sentence if the run in this folder used a task from another file.

    It is empty if that file is gone, or has the same content.
    """
    file = source("task", recipe.task.name)
    try:
        with damaged("environment.json"):
            there = Path(read_json(run / "environment.json")["task"])
        if file is None or there.suffix != ".py" or there.samefile(file):
            return ""
        if there.read_bytes() == file.read_bytes():
            return ""
    except (OSError, ValueError):
        return ""
    return f"was trained with the task of {there}; the task is now {file}"


def source_changed(recipe: Recipe, run: Path) -> str:
    """Return the end of a sentence if the source of the user's task has changed.

    It is empty if the source is that of the last checkpoint in this folder.
    """
    if recipe.task.name in CHOICES["task"]:
        return ""
    sealed = Store(run / "checkpoints").sealed()
    if not sealed:
        return ""
    try:
        with damaged(sealed[-1]):
            there = read_state(sealed[-1])["identity"]["source"].get("checksum")
        now = source_of(cast(type, resolve("task", recipe.task.name)))
    except (OSError, ValueError):
        return ""
    if there == now.get("checksum"):
        return ""
    return (
        f"the source of its task ({now.get('file', 'unknown file')}) has changed since: choose "
        "another run.dir to train it"
    )


def source_of(kind: type) -> dict[str, str]:
    """Return file and checksum of a task's source; for a class in a notebook, of its functions."""
    try:
        file = str(inspect.getsourcefile(kind))
        content = Path(file).read_bytes()
    except (TypeError, OSError):
        # No file: a notebook knows the source of functions.
        try:
            file = kind.__qualname__
            functions = [part for part in vars(kind).values() if inspect.isfunction(part)]
            content = "".join(map(inspect.getsource, functions)).encode()
        except (TypeError, OSError):
            return {}
    return {"file": file, "checksum": xxh3_64_hexdigest(content)}
