"""Seeds: whatever is random is a function of a few numbers."""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = (1 << 64) - 1


def mixed(state: int, number: int) -> int:
    """One more number mixed into a 64-bit state: a round of splitmix64 (Steele et al. 2014)."""
    state = ((state ^ (number & _MASK)) + GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def key(*numbers: int) -> int:
    """One well-mixed 63-bit key from integers, the same on every machine: a seed for (seed, step, rank, …)."""
    state = GOLDEN
    for number in numbers:
        state = mixed(state, number)
    return state >> 1
