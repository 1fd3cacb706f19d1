"""Seeds: every random number is a function of a few integers."""

import random

import numpy as np
import torch

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


def reseed(device: torch.device, *numbers: int, others: bool = False) -> None:
    """Makes what is random in the model a function of these numbers. About a microsecond; ten with ``others``, which
    seeds Python's and numpy's generators too."""
    number = key(*numbers)
    if others:
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    elif device.type != "cpu":
        torch.manual_seed(number)
