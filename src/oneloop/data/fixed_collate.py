"""Collate functions of any form of batch, which must not draw random numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oneloop.basics.seeds import has_drawn, random_states

BATCH = "batch"  # the user's batch, among what travels with it
_CPU = torch.device("cpu")


class FixedCollate:
    """A collate function with the weight: [(index, sample)] -> ({BATCH: batch}, weight).

    A random number that it drew would depend on how a step is divided into micro-batches. The first
    batch of each process shows whether it draws.

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
        self._checked = may_draw

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

        states = None if self._checked else random_states(_CPU)
        batch = self.collate(values)
        if states and has_drawn(states, _CPU):
            raise ValueError(
                "collate draws random numbers, which depend on how a step is divided; draw them in "
                "the data set's __getitem__ (for a collator of transformers, by "
                "oneloop.tasks.language.drawn_samples.DrawnSamples), or set grain"
            )
        self._checked = True
        weight = len(values) if self.weight is None else self.weight(batch)
        return {BATCH: batch}, float(weight)
