"""The source of the user's code: is it that of an earlier start, and the same on all hosts?"""

import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneloop.basics.content_hash import content_hash
from oneloop.run.environment import versions

_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))


def sources() -> dict[str, str]:
    """Return a hash of the source of each imported module that is not installed."""
    hashes = {}
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        if file.startswith(_LIBRARIES) or "-packages/" in file:
            continue
        with suppress(OSError):
            hashes[name] = content_hash(Path(file).read_bytes())
    return hashes


def sources_of_model(task: object, modules: Iterable[object]) -> dict[str, str]:
    """Return what identifies the code of a model: hashes of sources, versions of packages.

    The sources are those of the classes of task and modules, and of the modules of :func:`sources`
    whose names they mention. An installed package, also oneloop, counts by its version.

    Args:
        task: an instance.
        modules: all modules of the model; empty: a teacher, whose classes only the task knows.
    """
    own = sources()
    found: dict[str, str] = {}
    names = ["torch", "transformers"]  # what loads a teacher
    for part in (task, *modules):
        for kind in type(part).__mro__:
            names.append(kind.__module__)
            if kind.__module__ == "__main__" and "__main__" not in own:  # a notebook
                found[kind.__name__] = source_hash(kind)

    # Follow the names. A file counts by its own name: a script is another module when imported.
    for name in names:  # grows
        if name in own and name.partition(".")[0] != "oneloop":
            file = Path(str(sys.modules[name].__file__))
            found[file.name] = found.get(file.name, "") + own.pop(name)
            words = re.findall(r"\w+", file.read_text("latin-1"))
            names += [other for other in sorted(own) if other.rpartition(".")[2] in words]
    return found | versions(sorted({name.partition(".")[0] for name in names}))


def source_hash(kind: Any) -> str:
    """Return a hash of the file of a class; of a class in a notebook, of its functions' sources."""
    with suppress(TypeError, OSError):
        return content_hash(Path(str(inspect.getsourcefile(kind))).read_bytes())
    with suppress(TypeError, OSError):
        functions = filter(inspect.isfunction, vars(kind).values())
        return content_hash([*map(inspect.getsource, functions)])
    return "unknown"
