"""Collectives between the ranks of a run on the host, which never wait for a device."""

import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from oneloop.basics.exit_codes import BAD_INPUT, ERROR, BadInput, Unavailable
from oneloop.basics.extras import how_to_install
from oneloop.basics.files import printable
from oneloop.launch.signals import leave_at_once

LONG = timedelta(hours=2)
"""time-out of collectives while one rank may prepare, compile, evaluate, load or write for long"""
_PATIENCE = 15.0  # seconds that the other ranks have to receive an error of one rank


def limit_collectives(limit: timedelta, groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Set the time-out of all later collectives of these groups (None is left out)."""
    set_timeout = getattr(distributed_c10d, "set_timeout", None)
    if set_timeout is None:  # before torch 2.15
        set_timeout = distributed_c10d._set_pg_timeout
    for group in groups:
        if group is not None:
            set_timeout(limit, group)


class Agreement:
    """Host collectives of one rank; with several ranks, torch.distributed must be initialized.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        # oneloop plan: the other ranks do not exist
        several = ranks > 1 and dist.get_backend() != "fake"
        group = dist.new_group(backend="gloo", timeout=LONG) if several else None
        self.host = cast("dist.ProcessGroup | None", group)
        """process group of collectives on the host; None: one rank"""
        self.mesh_groups: list[dist.ProcessGroup] = []  # groups in which FSDP2 shards and reduces
        self.in_a_row = 0  # steps since the start, or since :meth:`be_patient`

    def be_patient(self) -> None:
        """Give collectives a long time-out, until enough steps were made after this call.

        Call it before work that may take one rank long while the others wait for it.
        """
        self.in_a_row = 0
        self.wait_at_most(LONG)

    def wait_at_most(self, limit: timedelta) -> None:
        """Limit the time of collectives from now on: a second safeguard, if no supervisor runs."""
        if self.host is not None:
            limit_collectives(limit, [dist.group.WORLD, self.host, *self.mesh_groups])

    def union(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank. Collective: call on every rank."""
        return [bool(flag) for flag in self.largest(*flags)]

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. Collective: call on every rank."""
        return self.union([flag])[0]

    def largest(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks. Collective: call on every rank."""
        shared = torch.tensor(values, dtype=torch.float64)
        if self.host:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self.host)
        return list(shared.tolist())

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of rank. Collective: call on every rank."""
        values = [value]
        if self.host:
            values = [None] * self.ranks
            dist.all_gather_object(values, value, group=self.host)
        return values

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value. Collective: call on every rank."""
        box = [value]
        if self.host:
            dist.broadcast_object_list(box, src=0, group=self.host)
        return box[0]

    @contextmanager
    def setting_up(self) -> Iterator[None]:
        """Turn an error of one rank into BadInput (or Unavailable) on all of them.

        The message is that of the first rank that has one. Collective: enter it on every rank.
        """
        mine: BadInput | Unavailable | None = None
        try:
            yield
        except (BadInput, Unavailable) as error:
            if error.shared:
                raise  # all ranks have it already
            mine = type(error)(str(error))
        except (ValueError, ImportError) as error:
            mine = BadInput(f"{error}{where(error)}{how_to_install(error)}")

        # A rank with an error gets here at once. The others may wait in a collective of the model.
        with _exit_if_blocked(mine if self.ranks > 1 else None):
            several = self.gathered(mine)
        for shared in several:
            if shared is not None:
                shared.shared = True
                raise shared

    def barrier(self) -> None:
        """Wait for all ranks; raise the error of one that ends :meth:`setting_up`. Collective."""
        with self.setting_up():
            pass


@contextmanager
def _exit_if_blocked(error: BadInput | Unavailable | None) -> Iterator[None]:
    """Print this rank's error and exit if the other ranks do not receive it in time.

    They may wait in a collective of the model. The launcher then ends them.
    """

    # On a thread, since this one waits in a collective.
    def end() -> None:
        line = printable(f"oneloop: rank {os.environ.get('RANK', '0')}: {error}")
        print(line, file=sys.stderr, flush=True)
        leave_at_once(ERROR if isinstance(error, Unavailable) else BAD_INPUT)

    timer = threading.Timer(_PATIENCE, end)
    timer.daemon = True
    if error is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def where(error: BaseException) -> str:
    """Return the position of an error in the user's code, so that a bug is not taken for bad input.

    It is the innermost line outside of libraries and oneloop; empty if oneloop raised the error.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if _ours(frames[-1].filename):
        return ""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    found = frames[-1]
    for frame in frames:
        if not _ours(frame.filename) and not frame.filename.startswith(libraries):
            found = frame
    return f" ({found.filename}:{found.lineno})"


def _ours(file: str) -> bool:
    return Path(file).is_relative_to(Path(__file__).parents[1])
