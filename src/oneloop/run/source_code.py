"""The source of the user's code: is it that of an earlier start, and the same on all hosts?"""

import inspect
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

from oneloop.basics.content_hash import content_hash

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


def source_hash(kind: Any) -> str:
    """Return a hash of the file of a class; of a class in a notebook, of its functions' sources."""
    with suppress(TypeError, OSError):
        return content_hash(Path(str(inspect.getsourcefile(kind))).read_bytes())
    with suppress(TypeError, OSError):
        functions = filter(inspect.isfunction, vars(kind).values())
        return content_hash([*map(inspect.getsource, functions)])
    return "unknown"
