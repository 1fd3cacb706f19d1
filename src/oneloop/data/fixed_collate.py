"""Collate functions of any form of batch, which must not draw random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.seeds import seed_others
from oneloop.data.seeded_samples import UNTOUCHED, UNTOUCHED_AGAIN, next_draws

BATCH = "batch"  # the user's batch, among what travels with it


class FixedCollate:
    """A collate function with the weight: [(index, sample)] -> ({BATCH: batch}, weight).

    A random number that it drew would depend on how a step is divided into micro-batches.

    Args:
        collate: makes a batch, of any form, from samples.
        weight: returns the weight of a batch; None: its number of samples.
        may_draw: whether it may draw random numbers, because the division is fixed.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        weight: Callable[[Any], Tensor | float] | None,
        *,
        may_draw: bool,
    ) -> None:
        self.collate = collate
        self.weight = weight
        self.may_draw = may_draw

    def __call__(self, samples: list[tuple[int, Any]]) -> tuple[dict[str, Any], float]:
        values = []
        for index, sample in samples:
            if sample is None and not self.weight:
                raise ValueError(
                    f"sample {index} of the data set is None; to leave it out, raise "
                    "oneloop.data.skipped_rows.SkipSample in __getitem__, and give the class "
                    "skips = True"
                )
            values.append(sample)
        batch = self.collate(values) if self.may_draw else self._fixed(values)
        weight = len(values) if self.weight is None else self.weight(batch)
        return {BATCH: batch}, float(weight)

    def _fixed(self, values: list[Any]) -> Any:
        """Return the batch. Raise ValueError if that drew random numbers."""
        # The caller finds out itself whether the samples drew: leave that visible to it.
        untouched = next_draws() == UNTOUCHED
        expected = UNTOUCHED_AGAIN
        if not untouched:
            seed_others(0)
            expected = UNTOUCHED
        state = torch.default_generator.get_state()
        batch = self.collate(values)
        drew = next_draws() != expected
        if drew or not torch.equal(torch.default_generator.get_state(), state):
            raise ValueError(
                "collate draws random numbers, which depend on how a step is divided; draw them in "
                "the data set's __getitem__ (for a collator of transformers, by "
                "oneloop.data.drawn_samples.DrawnSamples), or set grain"
            )
        if untouched:
            seed_others(0)
        return batch
