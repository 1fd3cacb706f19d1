"""In place of ``python -u -c CODE``: run the code in a process that is forked from the warm server.

pytest-xdist starts its workers so (``conftest.py``). They need not import torch and transformers.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import ModuleType

from world_server import Forked


def run_code(code: str, environment: dict[str, str]) -> None:
    """Run the code as the main module, with these environment variables."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c"]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(code, vars(main))
    atexit._run_exitfuncs()


if __name__ == "__main__":
    process = Forked(run_code, (sys.argv[-1], dict(os.environ)), files=(0, 1, 2))
    process.join()
    sys.exit(process.exitcode)
