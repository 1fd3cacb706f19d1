"""Base class of the tasks on pairs of answers: preferences and rewards."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oneloop.tasks.language.answer_rows import AnswerRows, Encode
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.pair_samples import PackedPairs, PaddedPairs, Pairs
from oneloop.tasks.language.pairs import SIDES, OverlongPair, encoded_pair
from oneloop.tasks.light_metrics import Means
from oneloop.tasks.rows.cached_arrays import Ragged


class PairRows(AnswerRows):
    """Opens pairs of answers, cuts and packs them.

    Args:
        data: value of ``task.data``.
        columns: column names by key of the task, other than tools and system.
        packed: whether training samples have several pairs.
        overlong: cut the end of an answer that is longer than length, or drop such pairs.
        rows: arguments of :class:`oneloop.tasks.language.answer_rows.AnswerRows`.
    """

    unit = "samples"
    lessons = "answer_pairs"
    padded = PaddedPairs  # class of samples that are not packed
    kinds: Sequence[Sequence[str]] = (("prompt", *SIDES), SIDES)

    def __init__(
        self,
        data: str | list[dict[str, Any]],
        columns: dict[str, str],
        *,
        packed: bool,
        overlong: OverlongPair = "cut",
        **rows: Any,
    ) -> None:
        super().__init__(data, columns, packed=packed, overlong=overlong, **rows)
        self.pairs: dict[str, Pairs] = {}
        """by name of the split, or SPLIT/SOURCE of a mixture"""

        # Tokenize the pairs of all sources, and pack those to train on.
        samples = []
        for source, splits in zip(self._sources, self._encoded_sources(), strict=True):
            made = {}
            for split, (pairs, content) in splits.items():
                self._note(split, pairs.notes)
                made[split] = self._samples(pairs, content, split)
                name = split if len(self._sources) == 1 else f"{split}/{source.name}"
                self.pairs[name] = made[split]
                # The log has a line about the training set of a single source anyway.
                if name != "train":
                    self._data_notes.append(f"{name}: {made[split].about()}")
            samples.append(made)
        self._use(self._sources, samples)
        self._data_notes.append(self._preview(samples[0]["train"]))
        self.notes = self._data_notes

    def _samples(self, pairs: Ragged, content: Any, split: str) -> Pairs:
        kind = PackedPairs if self.packed and split == "train" else self.padded
        try:
            return kind(pairs, self.length, content)
        except ValueError as error:
            raise ValueError(f"{split}: {error}") from error

    def new_pairs(self, data: str) -> PaddedPairs:
        """Return the pairs of other data, in order."""
        pairs, content = self._new_rows(data, labelled=True)
        made = PaddedPairs(pairs, self.length, content)
        self.pairs["data"] = made
        return made

    def _encode(self, *, labelled: bool) -> Encode:
        assert self.overlong != "split"
        return partial(encoded_pair, length=self.length, overlong=self.overlong)

    def _encode_key(self) -> Sequence[Any]:
        return ["pair, one border", self.length, self.overlong]

    def _preview(self, pairs: Pairs) -> str:
        """Return a log line with the texts of a pair."""
        chosen, rejected = (self._parts_of(side) for side in pairs.pair(0))
        return f"a pair: {chosen[0]!r}, chosen {chosen[1]!r}, rejected {rejected[1]!r}"

    def _parts_of(self, side: Any) -> tuple[str, str]:
        """Return prompt and answer of one side as texts."""
        first = int((side >= 0).argmax())
        tokens = token_ids(side).tolist()
        return self.decode(tokens[:first]), self.decode(tokens[first:])

    def update(  # type: ignore[override]
        self, metrics: Means, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        metrics.update({name: (value, torch.ones_like(value)) for name, value in outputs.items()})

    def _outputs(
        self,
        model: nn.Module,
        batch: dict[str, Tensor],
        values: Mapping[str, Tensor],
        each: Tensor,
        mask: Tensor,
    ) -> dict[str, Tensor]:
        """Return the outputs of a loss: in training means over the pairs, else the values.

        Args:
            model: in training or eval mode.
            batch: of ``collate``.
            values: (pairs,), by name.
            each: (pairs,), the loss of each pair.
            mask: (pairs,), which of them are pairs.
        """
        detached = {name: value.detach() for name, value in values.items()}
        if not model.training:
            return {"loss": each.detach(), **detached}
        count = mask.sum()
        means = {}
        for name, value in detached.items():
            means[name] = torch.where(mask, value, 0.0).sum() / count
        if "padding" in batch:
            means["padding"] = batch["padding"]
        return means

    def show(self, sample: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return the texts of a pair, and whether the chosen answer has the larger reward."""
        prompt, chosen = self._parts_of(sample[0])
        _, rejected = self._parts_of(sample[1])
        margin = outputs["reward_margin"]
        return {
            "text": f"{prompt}\n[chosen] {chosen}\n[rejected] {rejected}",
            "target": "chosen",
            "prediction": "chosen" if float(margin) > 0 else "rejected",
            "right": float(margin) > 0,
            "confidence": float(torch.sigmoid(margin.abs())),
        }
