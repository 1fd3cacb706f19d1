"""Checksums of some samples: they identify a data set that has no fingerprint."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_64

from oneloop.data.seeded_samples import SeededSamples

SAMPLES = 16  # samples of each data set that a resume compares
FIRST = 2  # first samples of each data set that all ranks compare

IN_PLACE = "changes what it stores when a sample is read"
OTHER = "returns other content for the same sample and seeds (its own generator, counter or state)"


def spread_checksum(seed: int, dataset: Any) -> str | None:
    """Return a checksum of evenly spaced samples; None if the first one differs each time."""
    keyed = SeededSamples(dataset, seed=seed)
    indices = sorted({k * len(dataset) // SAMPLES for k in range(SAMPLES)})
    samples = keyed.good([(0, index) for index in indices])
    whole = checksum(samples)
    first = checksum(samples[:1])
    again = [checksum([keyed[0, samples[0][0]]]) for _ in range(2)]
    return whole if again == [first, first] else None


def first_checksum(seed: int, dataset: Any) -> str | None:
    """Return a checksum of the first samples; None if one of them differs each time."""
    keyed = SeededSamples(dataset, seed=seed)
    places = [(0, index) for index in range(min(FIRST, len(dataset)))]
    first = checksum(keyed.good(places))
    second = checksum(keyed.good(places))
    return first if first == second else None


def fault(before: str, first: Any, again: Any) -> str:
    """Return what is wrong with a data set that loaded some samples twice; empty: nothing.

    Args:
        before: checksum of the first load, from before the second one.
        first: what the first load returned; it may share memory with the data set.
        again: what the second load returned.
    """
    if checksum(first) != before:
        return IN_PLACE
    return OTHER if checksum(again) != before else ""


def entry_checksums(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return a checksum of each entry of a batch. Host sync."""
    return {name: checksum([value]) for name, value in batch.items()}


def checksum(values: Any) -> str:
    """Return the xxh3-64 of tensors, arrays, strings, numbers, containers and attributes.

    Objects without attributes, such as dates, decimals and paths, count by their text (``repr``).
    If it contains an address in memory, they count by the name of their class.
    """
    state = xxh3_64()

    def take(value: Any, depth: int = 0) -> None:
        state.update(type(value).__name__.encode())
        if depth > 8:  # objects may refer to each other
            return

        # Tensors, arrays, texts and numbers.
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.is_nested:
                return
            state.update(f"{value.dtype}{tuple(value.shape)}".encode())
            flat = value.detach().cpu().contiguous().flatten()
            state.update(flat.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            state.update(f"{value.dtype}{value.shape}".encode())
            if value.dtype.hasobject:  # its bytes are addresses
                take(value.tolist(), depth + 1)
            else:
                state.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, str):
            state.update(value.encode(errors="surrogatepass"))
        elif isinstance(value, bytes):
            state.update(value)
        elif isinstance(value, int | float | complex | np.generic) or value is None:
            state.update(repr(value).encode())

        # Containers and objects.
        elif isinstance(value, Mapping):
            for name in sorted(value, key=str):
                take(str(name), depth + 1)
                take(value[name], depth + 1)
        elif hasattr(value, "tobytes") and hasattr(value, "size"):  # a PIL image
            state.update(repr(value.size).encode() + value.tobytes())
        elif isinstance(value, set | frozenset):
            take(sorted(checksum([inside]) for inside in value), depth + 1)
        elif isinstance(value, list | tuple):
            for inside in value:
                take(inside, depth + 1)
        elif getattr(value, "__dict__", None):
            take(vars(value), depth + 1)
        else:
            state.update(_text(value).encode(errors="surrogatepass"))

    for value in values:
        take(value)
    return state.hexdigest()


def _text(value: Any) -> str:
    """Return the text of an object; empty if it differs between processes."""
    try:
        text = repr(value)
    except Exception:
        return ""
    return "" if " at 0x" in text else text
