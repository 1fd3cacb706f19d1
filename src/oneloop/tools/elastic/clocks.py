"""Compare the clocks of the nodes. torch's rendezvous takes a node with another time for dead."""

import json
import threading
import time
from contextlib import suppress

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

_CLOCK = 2.0  # seconds by which the clocks of two nodes may differ
_TRIES = 5
_TICK = 0.5  # seconds between two times that the node of the rendezvous writes
_KEY = "clock"


def show_clock(store: Store, name: str) -> None:
    """Write the time of this node, which holds the store, there again and again, on a thread.

    Args:
        store: the store of the rendezvous.
        name: of this node, for messages.
    """

    def show() -> None:
        with suppress(DistError):
            while True:
                store.set(_KEY, json.dumps([name, time.time()]))
                time.sleep(_TICK)

    threading.Thread(target=show, daemon=True).start()


def clock_problem(store: Store, name: str) -> str:
    """Return an error message if the clock of this node is off; else an empty text.

    Args:
        store: the store of the rendezvous, whose node shows its clock.
        name: of this node, for messages.

    Raises:
        DistError: that node does not answer.
    """
    # A time is compared when it arrives. On a busy machine, that may take long.
    for _ in range(_TRIES):
        before = store.get(_KEY)
        while (shown := store.get(_KEY)) == before:
            time.sleep(_TICK / 10)
        other, its_time = json.loads(shown)
        apart = time.time() - its_time
        if abs(apart) <= _CLOCK:
            return ""

    word = "ahead of" if apart > 0 else "behind"
    return (
        f"the clock of {name} is {abs(apart):.0f} s {word} that of {other}, and {_CLOCK:.0f} s are "
        "allowed; set both (NTP), and start again"
    )
