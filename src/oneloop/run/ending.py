"""How a process of a run ends: with oneloop's exit code, through whatever launched it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from oneloop.basics import errors

EXIT_FILE = "ONELOOP_EXIT_FILE"
"""the variable by which ``oneloop launch`` says where it wants the exit code"""


def leave_at_once(code: int) -> NoReturn:
    """Ends this process from any thread and rank, without the others."""
    if file := os.environ.get(EXIT_FILE):
        Path(file).write_text(str(code))
    os._exit(code)


def leave(code: int, *, main: bool) -> NoReturn:
    """Ends this process: nothing is left to destructors, which abort now and then under gloo.

    Under ``oneloop launch`` the code goes through a file, since torchrun makes every code 1.
    """
    file = os.environ.get(EXIT_FILE)
    if file and code != errors.ERROR:
        if main:
            Path(file).write_text(str(code))
        code = 0
    elif code == errors.STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        code = 0  # torchrun would start the run again
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")  # bad input is told before torch is imported
    if distributed is not None and distributed.is_initialized() and code != errors.ERROR:
        distributed.destroy_process_group()  # after an error the other ranks may never come to that
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if not main and code not in (0, errors.ERROR):
            time.sleep(3)  # torchrun ends all ranks with the first that fails: let rank 0 say why first
        os._exit(code)
    raise SystemExit(code)
