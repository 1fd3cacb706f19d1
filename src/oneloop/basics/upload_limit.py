"""A limit on the bytes per second that uploads write."""

import time


class UploadLimit:
    """Slows down uploads to a rate.

    Args:
        rate: bytes per second; 0: no limit.
    """

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._next = 0.0  # time.monotonic() before which nothing may be written

    def wait(self, size: int) -> None:
        """Wait until a block of ``size`` bytes may be written."""
        time.sleep(max(0.0, self._next - time.monotonic()))
        pause = size / self._rate if self._rate else 0.0
        self._next = time.monotonic() + pause
