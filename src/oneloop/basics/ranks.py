"""Which process of a run this is, by the launcher's word: torch need not be there yet."""

from __future__ import annotations

import os


def ranks() -> int:
    """How many processes there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this one; 0 where there is but one."""
    return int(os.environ.get("RANK", "0")) if ranks() > 1 else 0
