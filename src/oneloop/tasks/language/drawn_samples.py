"""Samples for which a collator of transformers draws random numbers, such as masked words.

A collator draws for a whole batch, so that a sample depends on the batch. Here it draws for each
sample, in ``data[index]``, where oneloop seeds it by epoch and index: any layout trains the same.

>>> samples = DrawnSamples(rows, DataCollatorForLanguageModeling(tokenizer))
>>> class MaskedWords:
...     def train_set(self):
...         return samples
...     collate = staticmethod(samples.collate)  # only pads
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class DrawnSamples:
    """A map-style data set that applies a collator to each sample.

    Args:
        data: map-style: a sample is a dict, as the collator needs it (``input_ids``).
        collator: for example transformers' ``DataCollatorForLanguageModeling``. It must return
            tensors of one dimension per sample.

    Raises:
        ValueError: the collator has its own seed: its numbers would depend on the order of calls.
    """

    def __init__(self, data: Any, collator: Any) -> None:
        if getattr(collator, "seed", None) is not None:
            raise ValueError(
                f"{type(collator).__name__} has its own seed, so its numbers depend on the order "
                "of the samples; leave seed out"
            )
        self.data = data
        self.collator = collator

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample by name, each of shape (tokens,) or ()."""
        batch = self.collator([self.data[index]])
        return {name: torch.as_tensor(values)[0] for name, values in batch.items()}

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Return a batch: the samples, padded to the longest.

        Args:
            samples: of this data set.

        Raises:
            ValueError: how to pad an entry is unknown.
        """
        # transformers pads what a tokenizer returns, and labels.
        from transformers import DataCollatorForTokenClassification

        multiple = getattr(self.collator, "pad_to_multiple_of", None)
        padding = DataCollatorForTokenClassification(
            self.collator.tokenizer, pad_to_multiple_of=multiple
        )
        return dict(padding([*samples]))
