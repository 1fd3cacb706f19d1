"""Tokens of a masked language model: which are predicted, and what the model sees in their place.

A token is stored as twice its id, plus 1 if it continues the word of the token before it. The
bitwise complement stands for a special token, which is never predicted.

transformers' ``DataCollatorForLanguageModeling`` draws no random tokens for whole words, and cuts
words at blanks only.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oneloop.tasks.language.sequences import IGNORE
from oneloop.tasks.text_notes import remark_unknown


@dataclass(frozen=True)
class Masks:
    """How masks are drawn."""

    share: float  # probability that a token, or a word, is predicted
    kept: float  # share of the predicted tokens that the model sees unchanged
    replaced: float  # share of the predicted tokens that a random token replaces
    whole_words: bool  # whether the tokens of a word are predicted together

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(
                f"task.share {self.share} must be above 0 and at most 1; the default is 0.15"
            )
        if not (self.kept >= 0 and self.replaced >= 0 and self.kept + self.replaced <= 1):
            raise ValueError(
                f"task.kept {self.kept} and task.replaced {self.replaced} must be shares of the "
                "predicted tokens, at most 1 together; the default is 0.1 each"
            )


class MaskedTokens:
    """A tokenizer of transformers, and the masks that are drawn for its tokens.

    Args:
        model: the tokenizer.
        masks: how masks are drawn.
        name: the model's name, for messages.

    Raises:
        ValueError: it has no mask token or separator, or no words although whole words are masked.
    """

    def __init__(self, model: Any, masks: Masks, name: str | None) -> None:
        self.model = model
        self.masks = masks

        # Find the special tokens. Each text begins with a separator, which counts as a word.
        self.mask = model.mask_token_id
        self.separator = model.sep_token_id
        if self.separator is None:
            self.separator = model.eos_token_id
        for kind, token in (("mask", self.mask), ("separator", self.separator)):
            if token is None:
                raise ValueError(f"task.model {name!r}: its tokenizer has no {kind} token")
        ids = np.array(sorted(model.get_vocab().values()))
        self._special = np.array(sorted(model.all_special_ids))
        self.ordinary = torch.from_numpy(np.setdiff1d(ids, self._special))
        self.entries = int(ids.max()) + 1

        # Find the special tokens around a text, as inputs and targets.
        encoding = model("a", return_special_tokens_mask=True)
        inner = np.flatnonzero(np.array(encoding["special_tokens_mask"]) == 0)
        tokens = torch.tensor(encoding["input_ids"])
        sample = torch.stack([tokens, torch.full_like(tokens, IGNORE)])
        self._before = sample[:, : inner[0]]
        self._after = sample[:, inner[-1] + 1 :]
        self.around = len(tokens) - len(inner)

        words = model("one two three", add_special_tokens=False).word_ids()
        if masks.whole_words and len(set(words)) < 3:
            raise ValueError(
                f"task.whole_words: the tokenizer of {name} does not divide text into words; leave "
                "it out"
            )

    def encode(self, text: str) -> NDArray[np.int32]:
        """Return a separator and the tokens of a text, as they are stored."""
        encoding = self.model(text, add_special_tokens=False, verbose=False)
        remark_unknown(encoding["input_ids"], self.model)
        ids = np.array([self.separator, *encoding["input_ids"]], dtype=np.int32)
        words = np.array([-1 if word is None else word for word in encoding.word_ids()])
        stored = 2 * ids
        stored[2:] += (words[1:] == words[:-1]) & (words[1:] >= 0)
        return np.where(np.isin(ids, self._special), ~stored, stored)

    def draw(self, span: NDArray[np.int32]) -> Tensor:
        """Return inputs and targets of a sample, shape (2, tokens), from torch's generator.

        Args:
            span: stored tokens; the first one only separates it from the text before.
        """
        stored = torch.from_numpy(span[1:].astype(np.int64))
        can_be_drawn = stored >= 0
        stored = torch.where(can_be_drawn, stored, ~stored)
        tokens = stored >> 1

        # Draw a number for each token, or for each word. If none is below the share, the smallest
        # one is chosen: each is as likely.
        numbers = torch.rand(len(tokens) + 1)
        if self.masks.whole_words:
            numbers = numbers[(1 - (stored & 1)).cumsum(0)]
        else:
            numbers = numbers[1:]
        numbers = torch.where(can_be_drawn, numbers, torch.inf)
        chosen = (numbers < self.masks.share) | (numbers == numbers.min())

        # Draw what the model sees in place of each one.
        fate = torch.rand(len(tokens))
        others = self.ordinary[torch.randint(len(self.ordinary), (len(tokens),))]
        shown = torch.where(fate < self.masks.kept + self.masks.replaced, others, self.mask)
        shown = torch.where(fate < self.masks.kept, tokens, shown)

        inputs = torch.where(chosen, shown, tokens)
        targets = torch.where(chosen, tokens, IGNORE)
        return torch.cat([self._before, torch.stack([inputs, targets]), self._after], dim=1)
