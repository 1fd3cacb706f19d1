"""What identifies a data set: its own fingerprint, or a hash of some of its samples."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from oneloop.basics.content_hash import content_hash
from oneloop.basics.differences import Texts, texts
from oneloop.data.sample_reader import sample_reader
from oneloop.data.seeded_samples import SeededSamples

SAMPLES = 16  # samples of each data set that are compared
TWICE = 4  # of them are read twice
SAMPLED = f"hash of {SAMPLES} samples"  # of a data set without a fingerprint

IN_PLACE = "changes what it stores when a sample is read"
OTHER = "returns other content for the same sample and seeds (its own generator, counter or state)"


def fingerprint_of(dataset: Any) -> Mapping[str, Any] | None:
    """Return the result of a data set's ``fingerprint()`` by name; None if it has none."""
    method = getattr(dataset, "fingerprint", None)
    fingerprint = method() if callable(method) else None
    if fingerprint is None or isinstance(fingerprint, Mapping):
        return fingerprint
    return {"fingerprint": fingerprint}


def content_of(
    dataset: Any,
    *,
    seed: int,
    workers: int,
    call: Callable[[Callable[[], Any]], Any] = lambda function: function(),
) -> tuple[Texts, str]:
    """Return what identifies a data set: its fingerprint, or a hash of some samples.

    The hash is unknown (None) if these samples differ each time.

    Args:
        dataset: map-style.
        seed: of the samples' random numbers.
        workers: of the run; if there are any, one reads the samples.
        call: calls a function that runs the data set's code, there.

    Returns:
        The texts, and what is wrong with the samples.
    """
    wrong = ""
    content = call(partial(fingerprint_of, dataset))
    if content is None:
        read = partial(call, partial(sample_checksum, seed, dataset))
        with sample_reader(read, workers=workers) as run:
            checksum, wrong = run()
        content = {SAMPLED: None if wrong else checksum}
    return texts({"samples": len(dataset), **content}), wrong


def sample_checksum(seed: int, dataset: Any) -> tuple[str, str]:
    """Return a checksum of evenly spaced samples, and what is wrong with them, as :func:`fault`."""
    keyed = SeededSamples(dataset, seed=seed)
    indices = sorted({number * len(dataset) // SAMPLES for number in range(SAMPLES)})
    samples = keyed.good([(0, index) for index in indices])
    first = samples[:TWICE]
    checksum = content_hash(samples)
    before = content_hash(first)
    again = keyed.good([(0, index) for index, _ in first])
    return checksum, fault(before, first, again)


def fault(before: str, first: Any, again: Any) -> str:
    """Return what is wrong with a data set that loaded some samples twice; empty: nothing.

    Args:
        before: hash of the first load, from before the second one.
        first: what the first load returned; it may share memory with the data set.
        again: what the second load returned.
    """
    if content_hash(first) != before:
        return IN_PLACE
    return OTHER if content_hash(again) != before else ""
