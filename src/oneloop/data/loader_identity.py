"""What the state of a :class:`oneloop.data.loader.Loader` must agree with: seed, batch and data."""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from oneloop.basics.seeds import own_generators
from oneloop.basics.untrusted import damaged
from oneloop.data.fingerprint import content_checksum, differences, fingerprint_of
from oneloop.data.order import Ordered, order_hash
from oneloop.data.sample_checksums import SAMPLES, checksum, fault, spread_checksum
from oneloop.data.sample_reader import read_once
from oneloop.data.seeded_samples import SeededSamples, UnfitSample

_READ = 4  # first samples that are loaded twice


class Identity:
    """The seed, the batch size, the order and the data of a Loader.

    Args:
        dataset: map-style.
        order: of its samples.
        seed: of the order and the samples.
        batch_size: samples of one optimizer step.
        workers: data workers of this process; if there are any, one of them reads the samples.

    Raises:
        ValueError: the data set returns other content for the same sample and seeds.
    """

    def __init__(
        self, dataset: Any, order: Ordered, *, seed: int, batch_size: int, workers: int
    ) -> None:
        self.seed = seed
        self.batch_size = batch_size
        self._dataset = dataset
        self._length = len(dataset)
        self._order = order
        self._workers = workers
        self._values: dict[str, Any] | None = None
        self._content = fingerprint_of(dataset)
        # a hash of the content, which all ranks compare
        if self._content is None:
            self._hash = self._read(_checked_twice)
        else:
            self._hash = content_checksum(self._content)

    def _read(self, function: Any) -> Any:
        """Return the result of a function of seed and data set; it changes no generator."""
        with own_generators():
            return read_once(partial(function, self.seed, self._dataset), workers=self._workers)

    def of_rank(self) -> dict[str, Any]:
        """Return what all ranks must have in common; it can be compared."""
        return {
            "seed": self.seed,
            "batch size": self.batch_size,
            "length of the data set": self._length,
            "order of the data set": self.order_hash(0),
            "hash of the data set": self._hash,
        }

    def order_hash(self, position: int) -> str:
        """Return a hash of the order, also of the samples of this step (from 0)."""
        start = position * self.batch_size
        return order_hash(self._order, self._length, self.batch_size, position=start)

    def values(self) -> dict[str, Any]:
        """Return the entries of a state. The first call reads some samples."""
        if self._values is None:
            data: dict[str, Any] = {"length": self._length}
            if self._content is None:
                data[f"checksum of {SAMPLES} samples"] = self._read(spread_checksum)
            data |= self._content or {}
            data = json.loads(json.dumps(data))  # as it is after a JSON file
            self._values = {"seed": self.seed, "batch_size": self.batch_size, "data": data}
        return self._values

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state is of a loader with another seed, batch size or data set."""
        about = self.values()
        missing = [name for name in ("position", "order", *about) if name not in state]
        if missing:
            raise ValueError(
                f"the state of a Loader lacks {', '.join(missing)}; it has "
                f"{', '.join(map(str, state)) or 'nothing'}: load what state_dict() returned"
            )
        if len(self._dataset) != self._length:
            raise ValueError(
                f"the data set had {self._length:,} samples when the Loader was made, and now has "
                f"{len(self._dataset):,}; make the Loader after the data set is complete"
            )
        with damaged("the state of a Loader"):
            different = differences({name: state[name] for name in about}, about)
        if different:
            raise ValueError(
                f"the state is of another Loader ({'; '.join(different)}): its steps have other "
                "samples; use its arguments and its data set, or begin without this state"
            )

    def check_order(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state, which :meth:`check` accepts, is of another order."""
        if state["order"] != self.order_hash(state["position"]):
            raise ValueError(
                "the state is of a Loader with another order of the same samples; use the same "
                "shuffle=, and let an order() of the data set depend on its arguments only"
            )


def _checked_twice(seed: int, dataset: Any) -> str:
    """Return a checksum of the first samples. Raise ValueError if a second load differs."""
    keyed = SeededSamples(dataset, seed=seed)
    places = [(0, index) for index in range(min(_READ, len(dataset)))]
    try:
        first = keyed.good(places)
        found = checksum(first)
        again = keyed.good(places)
    except UnfitSample:  # none of the first rows can be used
        return ""
    wrong = fault(found, first, again)
    if wrong:
        raise ValueError(
            f"the data set {wrong}; return copies of what it stores, and draw random numbers from "
            "torch's, Python's or numpy's global generator"
        )
    return found
