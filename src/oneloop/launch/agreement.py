"""What the ranks of a run tell one another, on the host: it never waits for a device."""

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from oneloop.basics.exit_codes import BAD_INPUT, BadInput
from oneloop.basics.files import printable
from oneloop.launch.signals import leave_at_once

_PATIENCE = 15.0  # seconds in which the others hear of what is wrong on one rank


class Agreement:
    """The ranks of a run, as one of them talks to the others; with several, torch.distributed is initialized."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.host = cast("dist.ProcessGroup | None", dist.new_group(backend="gloo") if ranks > 1 else None)
        """of collectives on the host; None: one rank"""

    def union(self, flags: list[bool]) -> list[bool]:
        """Which of these flags are set on any rank. Collective: call on every rank."""
        shared = torch.tensor(flags, dtype=torch.uint8)
        if self.host:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.host)
        return list(map(bool, shared.tolist()))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Every rank must get here."""
        return self.union([flag])[0]

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over all ranks. Every rank must get here."""
        shared = torch.tensor(values, dtype=torch.float64)
        if self.host:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.host)
        return list(shared.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        values = [value]
        if self.host:
            values = [None] * self.ranks
            dist.all_gather_object(values, value, group=self.host)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        box = [value]
        if self.host:
            dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Turn an error of one rank into BadInput on all of them, with the message of the first rank that has one."""
        message: str | None = None
        try:
            yield
        except BadInput as error:
            message = str(error)
        except (ValueError, ImportError) as error:
            message = f"{error}{where(error)}"
        with _not_alone(message if self.ranks > 1 else None):
            several = self.gathered(message)
        for shared in several:
            if shared is not None:
                raise BadInput(shared)


@contextmanager
def _not_alone(message: str | None) -> Iterator[None]:
    """Where the other ranks never come to hear what is wrong on this one (they wait for it in a collective of the
    model's), this process says it itself and ends, and the launcher ends the others."""

    def say() -> None:
        print(printable(f"oneloop: rank {os.environ.get('RANK', '0')}: {message}"), file=sys.stderr, flush=True)
        leave_at_once(BAD_INPUT)

    waiting = threading.Timer(_PATIENCE, say)
    waiting.daemon = True
    if message is not None:
        waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


def where(error: BaseException) -> str:
    """Where an error of someone else's code was raised, so that a bug there is not taken for a typing error: the
    innermost line that is neither of a library nor of oneloop."""
    frames = traceback.extract_tb(error.__traceback__)
    if _ours(frames[-1].filename):
        return ""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    own = [frame for frame in frames if not _ours(frame.filename) and not frame.filename.startswith(libraries)]
    frame = (own or frames)[-1]
    return f" ({frame.filename}:{frame.lineno})"


def _ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])
