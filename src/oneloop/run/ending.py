"""How a process of a run ends: with oneloop's exit code, through whatever launched it."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from oneloop.basics import errors
from oneloop.basics.exit_code import noted, taken
from oneloop.basics.ranks import ranks
from oneloop.supervise.link import LINK


def leave_at_once(code: int) -> NoReturn:
    """Ends this process from any thread and rank, without the others."""
    noted(code)
    LINK.tell(ended=code)
    os._exit(code)


def leave(code: int, *, main: bool) -> NoReturn:
    """Ends this process: nothing is left to destructors, which abort now and then under gloo.

    Under ``oneloop launch`` the code goes through a file, since torchrun makes every code 1.
    """
    several = ranks() > 1
    LINK.tell(ended=code)
    if taken() and (code != errors.ERROR or not several):
        if main:
            noted(code)
        code = 0
    elif code == errors.STOPPED and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        code = 0  # torchrun would start the run again
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")  # bad input is told before torch is imported
    if distributed is not None and distributed.is_initialized() and code != errors.ERROR:
        distributed.destroy_process_group()  # after an error the other ranks may never come to that
    if several:
        if not main and code not in (0, errors.ERROR):
            time.sleep(3)  # torchrun ends all ranks with the first that fails: let rank 0 say why first
        os._exit(code)
    if LINK.watched and code == errors.ERROR:  # nothing waits for a process that loads data, which may block
        os._exit(code)
    raise SystemExit(code)
