"""A run in the user's interpreter, which restores the state of the process.

>>> with borrowed(mixed_precision="bf16"):
...     run = start()
...     ...
"""

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize

import numpy as np
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState

from oneloop.basics.exit_codes import BadInput
from oneloop.machine.torch_settings import float32_restored

_PRECISIONS = ("no", "bf16", "fp16", "fp8")


@contextmanager
def borrowed(mixed_precision: str | None = None) -> Iterator[None]:
    """Clear accelerate's state in this context, and set its precision (None: the launcher's).

    Afterwards accelerate's shared state, the environment, torch's switches and the random
    generators are restored. One process makes no process group. With several, the group remains:
    torch cannot create a second one at the launcher's address. Raise BadInput for an unknown
    precision.
    """
    # Remember the state of accelerate and the environment.
    states = (PartialState, AcceleratorState, GradientState)
    before = [dict(state._shared_state) for state in states]
    environment = dict(os.environ)
    Finalize(None, _end_group, exitpriority=0)
    _clear(states)

    # Run the block, and restore both.
    try:
        with _switches(), _random():
            os.environ["ACCELERATE_MIXED_PRECISION"] = _precision(mixed_precision)
            yield
    finally:
        _clear(states)
        for state, held in zip(states, before, strict=True):
            state._shared_state.update(held)
        os.environ.clear()
        os.environ.update(environment)


def _end_group() -> None:
    """Destroy the process group at exit, before destructors, which abort sometimes under gloo."""
    if dist.is_initialized() and sys.exc_info()[0] is None:
        dist.destroy_process_group()


def _clear(states: tuple[type, ...]) -> None:
    for state in states:
        state._shared_state.clear()  # type: ignore[attr-defined]


def _precision(asked: str | None) -> str:
    # notebook_launcher sets MIXED_PRECISION, which accelerate does not read.
    current = (
        os.environ.get("ACCELERATE_MIXED_PRECISION") or os.environ.get("MIXED_PRECISION") or "no"
    )
    if asked is not None and asked not in _PRECISIONS:
        raise BadInput(f"mixed_precision {asked!r} is unknown; known: {', '.join(_PRECISIONS)}")
    return asked or current


@contextmanager
def _switches() -> Iterator[None]:
    # Remember what a run sets.
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    threads = torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    try:
        with float32_restored():
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        torch.set_num_threads(threads)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def _random() -> Iterator[None]:
    python = random.getstate()
    arrays = np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    apple = range(torch.mps.device_count())
    try:
        with (
            torch.random.fork_rng(devices, device_type="cuda"),
            torch.random.fork_rng(apple, device_type="mps"),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)
