"""A run in the user's interpreter, which restores the state of the process.

>>> with borrowed(mixed_precision="bf16"):
...     run = start()
...     ...
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from oneloop.basics.exit_codes import BadInput
from oneloop.basics.launcher import die_with_launcher
from oneloop.basics.seeds import restored_generators
from oneloop.machine.torch_settings import float32_restored
from oneloop.recipe.class_paths import reject_while_importing

# held by the running call: accelerate's state and torch's generators are global
_LOCK = threading.Lock()


@contextmanager
def borrowed(caller: str = "oneloop", mixed_precision: str | None = None) -> Iterator[None]:
    """Clear accelerate's state in this context, and set its precision.

    Afterwards accelerate's shared state, the environment, torch's switches and the random
    generators are restored. One process makes no process group. With several, the group remains:
    torch cannot create a second one at the launcher's address.

    Args:
        caller: the function that is called. A second call in this process is rejected.
        mixed_precision: of accelerate; None: the launcher's.

    Raises:
        BadInput: of the block; only its message is raised.
    """
    die_with_launcher()
    reject_while_importing()
    if not _LOCK.acquire(blocking=False):
        raise BadInput(
            f"{caller}: another call of oneloop is under way in this process; wait for it to end"
        )
    Finalize(None, _end_group, exitpriority=0)

    # notebook_launcher sets MIXED_PRECISION, which accelerate does not read.
    for name in ("ACCELERATE_MIXED_PRECISION", "MIXED_PRECISION"):
        mixed_precision = mixed_precision or os.environ.get(name)

    # Remember what a run sets: accelerate's state, the environment, and torch's switches.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        with (
            patch.dict(PartialState._shared_state, clear=True),
            patch.dict(AcceleratorState._shared_state, clear=True),
            patch.dict(GradientState._shared_state, clear=True),
            patch.dict(os.environ, ACCELERATE_MIXED_PRECISION=mixed_precision or "no"),
            float32_restored(),
            restored_generators(),
            torch.random.fork_rng(gpus, device_type="cuda"),
            torch.random.fork_rng(range(torch.mps.device_count()), device_type="mps"),
        ):
            yield
    except BadInput as error:
        raise BadInput(str(error)) from None
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark
        _LOCK.release()


def _end_group() -> None:
    """Destroy the process group at exit, before destructors, which abort sometimes under gloo."""
    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()
