"""Files and their descriptors."""

import selectors


def readable_within(handle: int, seconds: float | None) -> bool:
    """Wait until a file descriptor can be read; return whether it can.

    It may have any number: ``select.select`` fails from 1,024 on.

    Args:
        handle: of a pipe or socket.
        seconds: how long to wait; None: no limit.
    """
    with selectors.PollSelector() as selector:
        selector.register(handle, selectors.EVENT_READ)
        return bool(selector.select(seconds))
