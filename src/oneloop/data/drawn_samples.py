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
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

_IGNORE = -100  # label of a token that is not predicted


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
        tokenizer = self.collator.tokenizer
        padding = {
            "input_ids": tokenizer.pad_token_id,
            "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0),
            "attention_mask": 0,
            "special_tokens_mask": 1,
            "labels": _IGNORE,
        }
        batch = {}
        for name in samples[0]:
            values = [sample[name] for sample in samples]
            if values[0].ndim == 0:
                batch[name] = torch.stack(values)
            elif values[0].ndim == 1 and name in padding:
                batch[name] = pad_sequence(values, True, float(padding[name]))
            else:
                raise ValueError(
                    f"{name!r} of shape {tuple(values[0].shape)} cannot be padded; known: "
                    f"{', '.join(padding)}"
                )
        return self._to_multiple(batch, padding)

    def _to_multiple(self, batch: dict[str, Tensor], padding: dict[str, int]) -> dict[str, Tensor]:
        """Pad the batch to a multiple of the collator's ``pad_to_multiple_of``."""
        multiple = getattr(self.collator, "pad_to_multiple_of", None) or 1
        for name, values in [*batch.items()]:
            missing = -values.shape[-1] % multiple if values.ndim == 2 else 0
            if missing:
                batch[name] = pad(values, (0, missing), value=padding[name])
        return batch
