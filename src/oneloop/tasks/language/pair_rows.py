"""Base class of the tasks on pairs of answers: preferences and rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.tasks.language.answer_rows import (
    AnswerRows,
    AnswerSettings,
    tokenizer_from_scratch,
)
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.language_model import LanguageModel
from oneloop.tasks.language.pairs import SIDES, OverlongPair, encoded_pair
from oneloop.tasks.language.sequences import Sample, Samples, input_tokens, paired
from oneloop.tasks.language.token_rows import Data
from oneloop.tasks.light_metrics import Means
from oneloop.tasks.rows.cached_arrays import Ragged

METRICS: dict[str, bool | None] = {
    "reward_accuracy": True,
    "reward_margin": True,
    "chosen_reward": None,
    "rejected_reward": None,
}
"""metrics of a pair, and whether a larger value is better"""
PAIRS = (("prompt", *SIDES), SIDES)
"""keys of each kind of rows with pairs, the first choice first"""


@dataclass(frozen=True, kw_only=True)
class PairSettings(AnswerSettings):
    """A language model that learns from pairs of answers, and how their rows are read.

    Args:
        overlong: cut the end of an answer that is longer than length, or drop such pairs.
    """

    overlong: OverlongPair = "cut"


class PairTask(LanguageModel):
    """Opens pairs of answers, cuts and packs them.

    Args:
        data: value of ``task.data``.
        columns: column names by key of the task, other than tools and system.
        settings: the model, and how rows are read.
        packed: whether training samples have several pairs.
        kinds: keys of each kind of rows.
        special: special tokens of a tokenizer from scratch, by role.
    """

    unit = "samples"
    last_is_input = False  # whether the last token of an answer is an input, too

    def __init__(
        self,
        data: Data,
        columns: dict[str, str],
        settings: PairSettings,
        *,
        packed: bool,
        kinds: Sequence[Sequence[str]] = PAIRS,
        special: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(settings, packed=packed)
        if self.name:
            self.tokenizer = self.known_tokenizer()
        else:
            self.tokenizer = tokenizer_from_scratch(settings.vocab)
            self.tokenizer.add_special_tokens({**(special or {})})
        self.end = self.tokenizer.eos_token_id

        # Tokenize the pairs of all sources, and pack those to train on.
        length = self.length - self.last_is_input
        encode = partial(encoded_pair, length=length, overlong=settings.overlong)
        rows = AnswerRows(
            data,
            columns,
            kinds,
            encode,
            settings,
            tokenizer=self.tokenizer,
            packaged="answer_pairs",
        )
        self._use_rows(rows, self._samples)
        for name, samples in self.samples.items():
            # The log has a line about the training set of a single source anyway.
            if name != "train":
                self._data_notes.append(f"{name}: {samples.about()}")
        first = next(iter(self.samples.values()))
        prompt, chosen, rejected = self._texts_of([first.document(0), first.document(1)])
        self._data_notes.append(f"a pair: {prompt!r}, chosen {chosen!r}, rejected {rejected!r}")

    def _samples(self, split: str, pairs: Ragged, content: Any) -> Samples:
        """Return the pairs of one split; only training samples are packed."""
        self._note(split, pairs.notes)
        return paired(
            pairs,
            f"task.length ({self.length:,} tokens)",
            room=2 * self.length if self.packed and split == "train" else 0,
            measure=filled_tokens if self.last_is_input else input_tokens,
            content=content,
        )

    def samples_of(self, data: str, *, labelled: bool) -> Samples:
        return self._samples("data", *self.rows.tokens(data, self.rows.kinds, self.rows.encode))

    def _texts_of(self, documents: Sequence[Any]) -> list[str]:
        """Return the prompt and both answers of a pair as texts."""
        texts = list[str]()
        for side in documents:
            first = int((side >= 0).argmax())
            tokens = token_ids(side).tolist()
            texts += [self.decode(tokens[:first]), self.decode(tokens[first:])]
        prompt, chosen, _, rejected = texts
        return [prompt, chosen, rejected]

    def update(  # type: ignore[override]
        self, metrics: Means, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        metrics.update({name: (value, torch.ones_like(value)) for name, value in outputs.items()})

    def show(self, sample: Sample, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return the texts of a pair, and whether the chosen answer has the larger reward."""
        prompt, chosen, rejected = self._texts_of(sample.documents)
        margin = outputs["reward_margin"]
        return {
            "text": f"{prompt}\n[chosen] {chosen}\n[rejected] {rejected}",
            "target": "chosen",
            "prediction": "chosen" if float(margin) > 0 else "rejected",
            "right": float(margin) > 0,
            "confidence": float(torch.sigmoid(margin.abs())),
        }


def filled_tokens(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of input tokens of pairs, whose sides are filled up to one length."""
    return np.asarray(2 * sizes.max(1))


def pair_outputs(
    batch: Mapping[str, Tensor],
    values: Mapping[str, Tensor],
    losses: Tensor,
    mask: Tensor,
    *,
    training: bool,
) -> dict[str, Tensor]:
    """Return the outputs of a loss: in training means over the pairs, else the values.

    Args:
        batch: of ``collate``.
        values: (pairs,), by name.
        losses: (pairs,), the loss of each pair.
        mask: (pairs,), which of them are pairs.
        training: whether the model is in training mode.
    """
    if not training:
        return {name: value.detach() for name, value in {"loss": losses, **values}.items()}
    count = mask.sum()
    means = {"padding": batch["padding"]}
    for name, value in values.items():
        means[name] = torch.where(mask, value.detach(), 0.0).sum() / count
    return means
