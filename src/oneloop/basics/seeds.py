"""Seeds: whatever is random is a function of a few numbers."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = (1 << 64) - 1


def key(*numbers: int) -> int:
    """One well-mixed 63-bit key from integers, the same on every machine: a seed for (seed, step, rank, …)."""
    state = GOLDEN
    for number in numbers:
        state = ((state ^ (number & _MASK)) + GOLDEN) & _MASK  # splitmix64 (Steele et al. 2014)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
