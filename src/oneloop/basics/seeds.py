"""Seeds: every random number is a function of a few integers."""

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch

Value = TypeVar("Value")
GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment
_MASK = (1 << 64) - 1
_CPU = torch.device("cpu")


def mixed(state: int, number: int) -> int:
    """Mix one more number into a 64-bit state, with a round of splitmix64 (Steele et al. 2014)."""
    state = ((state ^ (number & _MASK)) + GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def key(*numbers: int) -> int:
    """Return a well-mixed 63-bit key from integers, equal on every machine.

    They are, for example, (seed, step, rank).
    """
    state = GOLDEN
    for number in numbers:
        state = mixed(state, number)
    return state >> 1


_others_seeded = True


def others_seeded() -> bool:
    """Return whether Python's and numpy's generators matter: the last :func:`reseed` seeded them.

    True if it was never called.
    """
    return _others_seeded


def reseed(device: torch.device, *numbers: int, others: bool = False) -> None:
    """Seed torch's generators from these numbers; takes about 1 us.

    With ``others``, seed also Python's and numpy's generators (10 us).
    """
    global _others_seeded
    _others_seeded = others
    number = key(*numbers)
    if others:
        seed_others(number)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    elif device.type != "cpu":
        torch.manual_seed(number)


def seed_others(number: int) -> None:
    """Seed Python's and numpy's global generators; takes about 10 us."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


def other_states() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators, which can be compared (50 us)."""
    kind, numbers, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, numbers.tolist(), *rest  # type: ignore[union-attr]


def set_other_states(states: Sequence[Any]) -> None:
    """Restore what :func:`other_states` returned, also after a JSON file."""
    (version, words, gauss), kind, numbers, *rest = states
    random.setstate((version, tuple(words), gauss))
    # From a list, numpy sets its state 20 times as fast as from an array.
    np.random.set_state((kind, numbers, *rest))


def random_states(device: torch.device) -> list[Any]:
    """Return the states of the generators of torch, Python and numpy (and of the device).

    They are plain values, which can be compared and written to a JSON file.
    """
    states = [_text(torch.get_rng_state()), other_states()]
    if device.type != "cpu":
        states.append(_text(torch.get_device_module(device).get_rng_state(device)))
    return states


def set_random_states(states: Sequence[Any], device: torch.device) -> None:
    """Restore what :func:`random_states` returned, also after a JSON file."""
    torch.set_rng_state(_state(states[0]))
    set_other_states(states[1])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(_state(states[2]), device)


@contextmanager
def restored_generators(device: torch.device = _CPU) -> Iterator[None]:
    """Restore the generators of torch, Python and numpy (and of the device) on exit."""
    states = random_states(device)
    try:
        yield
    finally:
        set_random_states(states, device)


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _state(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def with_restored_generators(values: Iterable[Value]) -> Iterator[Value]:
    """Yield the values, each computed with :func:`restored_generators`."""
    iterator = iter(values)
    while True:
        with restored_generators():
            try:
                value = next(iterator)
            except StopIteration:
                return
        yield value
