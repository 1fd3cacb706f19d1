"""Preferences: a language model learns from pairs of a chosen and a rejected answer."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.basics.wide_sums import on_host
from oneloop.tasks.frozen.task import FrozenModel, FrozenTask
from oneloop.tasks.language import preference_losses as losses
from oneloop.tasks.language.answer_rows import NEEDS
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.pair_rows import METRICS, PairSettings, PairTask, pair_outputs
from oneloop.tasks.language.sequences import (
    IGNORE,
    Sample,
    Samples,
    collated,
    records_of_targets,
)
from oneloop.tasks.language.token_rows import Data
from oneloop.tasks.light_metrics import Means

PreferenceLoss = Literal["dpo", "robust", "hinge", "ipo", "ipo_mean", "simpo", "orpo"]
_ALONE = ("simpo", "orpo")  # losses without a reference
_BETA = {"simpo": 2.0}  # defaults other than 0.1


RECORD = np.dtype([("logp", "<f8")])
"""what is stored of a position: the log-probability of the next token, in nats"""


class Preference(FrozenTask, PairTask):
    """Preference optimization on pairs of answers.

    The weight of a sample is its number of pairs. The reference is the model before the first step:
    its log-probabilities are computed once, and stored.

    Args:
        data: lessons (synthetic conversations with wrong answers); a file or folder of json lines,
            parquet or arrow; hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7},
            …]. See held_out.
        prompt: optional column of the prompts, texts or messages; without it, both answers are
            whole texts or conversations that begin equally.
        chosen: column of the better answers.
        rejected: column of the worse answers.
        loss: dpo, robust, hinge, ipo or ipo_mean (of the tokens of an answer, as TRL), which
            compare with the reference; simpo or orpo, which need none.
        beta: strength of the constraint to the reference (simpo, orpo: scale of the rewards); null:
            0.1, and 2 for simpo.
        label_smoothing: share of wrong labels (dpo, robust, simpo).
        margin: target margin of the rewards (gamma of simpo).
        store: folder of the reference's log-probabilities (null: the cache of this host).
        pack: packed (several pairs per row; none attends to another) or padded (one pair per two
            rows; the pairs of a step have similar lengths).
    """

    needs = NEEDS | {
        "label_smoothing": "loss=dpo|robust|simpo",
        "margin": "loss=simpo",
        "store": "loss!=simpo|orpo",
    }

    def __init__(
        self,
        data: Data = "lessons",
        prompt: str = "prompt",
        chosen: str = "chosen",
        rejected: str = "rejected",
        loss: PreferenceLoss = "dpo",
        beta: float | None = None,
        label_smoothing: float = 0.0,
        margin: float = 1.0,
        store: str | None = None,
        pack: Literal["packed", "padded"] = "packed",
        **settings: Any,
    ) -> None:
        # Check the settings of the loss before any data is read.
        self.kind = loss
        self.beta = _BETA.get(loss, 0.1) if beta is None else beta
        self.label_smoothing = label_smoothing
        self.margin = margin
        self.average = loss in (*_ALONE, "ipo_mean")
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"task.beta {beta} must be a positive number (common: 0.1)")
        if not 0 <= label_smoothing < 0.5:
            raise ValueError(
                f"task.label_smoothing {label_smoothing} must be at least 0 and below 0.5, the "
                "share of pairs whose answers are swapped"
            )
        super().__init__(
            data,
            {"prompt": prompt, "chosen": chosen, "rejected": rejected},
            PairSettings(**settings),
            packed=pack == "packed",
        )
        self.sample_weight = None if self.packed else 1.0

        # Let a run compute what the reference says about each token of each side.
        if loss not in _ALONE:
            self.frozen = FrozenModel(
                "the reference",
                {},
                batch=self._documents,
                compute=self._log_probabilities,
                kind={"records": "log-probabilities of the next tokens"},
                address=store,
            )
            for name, samples in self.samples.items():
                self.frozen.outputs[name] = samples.freeze(RECORD, targets=False)
            self._data_notes.append(self.frozen.note)

    def samples_of(self, data: str, *, labelled: bool) -> Samples:
        samples = super().samples_of(data, labelled=labelled)
        self.samples["data"] = samples
        if self.frozen:
            self.frozen.outputs["data"] = samples.freeze(RECORD, targets=False)
        return samples

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Return pairs as one batch: two rows each, or two documents of a packed row each.

        ``reference`` has the frozen log-probabilities, (rows, width, 2) in float32, 0 where no
        token is a target. A number is the sum of both, which runs in float64 add exactly: no GPU of
        Apple has float64.
        """
        batch = collated(samples, width=2 * self.length, most=self._max_documents)
        if samples[0].records:
            values = np.zeros((*batch["target"].shape, 2), dtype=np.float32)
            logp = records_of_targets(samples)["logp"]
            rounded = logp.astype(np.float32)
            values[batch["target"] != IGNORE] = np.stack([rounded, logp - rounded], axis=1)
            batch["reference"] = torch.from_numpy(values)
        return batch

    def _answer_sums(self, values: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the sums of a value of each token over both sides of each pair.

        They are deterministic: without atomic additions, and without matrix products (TF32).

        Args:
            values: (rows, width).
            batch: of ``collate``.

        Returns:
            (2, pairs): of the chosen and the rejected sides. Packed rows have equally many pairs;
            an empty place has no targets.
        """
        if "document" in batch:
            document = batch["document"] - batch["document"][:, :1]
            numbers = torch.arange(self._max_documents, device=document.device)
            is_inside = document[:, None] == numbers[:, None]
            values = (values[:, None] * is_inside).flatten(0, 1)
        return values.sum(-1).view(-1, 2).T

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        is_target = batch["target"] != IGNORE
        return (self._answer_sums(is_target, batch)[0] > 0).sum().to(torch.float32)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        # Sum the log-probabilities of both answers of each pair.
        logp = -self.token_losses(model, batch)
        is_target = (batch["target"] != IGNORE).to(logp.dtype)
        counts = self._answer_sums(is_target, batch)
        tokens = counts.clamp(min=1)
        rewards = self._answer_sums(logp, batch)
        values = {"chosen_logp": rewards[0], "rejected_logp": rewards[1]}

        # Compare them with those of the reference, or their means.
        if self.average:
            rewards = rewards / tokens
        if self.frozen:
            reference = batch["reference"].to(logp.dtype).sum(-1) * is_target
            of_reference = self._answer_sums(reference, batch)
            if self.average:
                of_reference = of_reference / tokens
            rewards = rewards - of_reference
            moved = losses.divergence_of_answer(logp.detach() - reference) * is_target
            values["kl"] = self._answer_sums(moved, batch).sum(0) / tokens.sum(0)
        chosen, rejected = rewards
        apart = chosen - rejected

        # An empty place of a packed row counts nothing.
        mask = counts[0] > 0
        each = torch.where(mask, self._each(chosen, rejected, apart), 0.0)
        values["chosen_reward"] = self.beta * chosen
        values["rejected_reward"] = self.beta * rejected
        values["reward_margin"] = self.beta * apart
        values["reward_accuracy"] = (chosen > rejected).to(logp.dtype)
        outputs = pair_outputs(batch, values, each, mask, training=model.training)
        return each.sum(), outputs

    def _each(self, chosen: Tensor, rejected: Tensor, apart: Tensor) -> Tensor:
        """Return the loss of each pair."""
        beta = self.beta
        smoothing = self.label_smoothing
        match self.kind:
            case "dpo":
                return losses.dpo(apart, beta=beta, smoothing=smoothing)
            case "robust":
                return losses.robust(apart, beta=beta, smoothing=smoothing)
            case "hinge":
                return losses.hinge(apart, beta=beta)
            case "orpo":
                return losses.orpo(chosen, rejected, beta=beta)
            case "simpo":
                return losses.simpo(apart, beta=beta, margin=self.margin, smoothing=smoothing)
        return losses.ipo(apart, beta=beta)

    def metrics(self) -> Means:  # type: ignore[override]
        names = ("chosen_logp", "rejected_logp", *(("kl",) if self.frozen else ()))
        return Means(METRICS | dict.fromkeys(names))

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        """Return the loss and the metrics of each pair."""
        return {name: outputs[name].tolist() for name in ("loss", *self.metrics().names)}

    def _documents(self, name: str, documents: Sequence[int]) -> dict[str, Tensor]:
        """Return a batch of documents, in which each token with a next one has a target."""
        samples = self.samples[name]
        return collated([Sample([token_ids(samples.document(number))]) for number in documents])

    def _log_probabilities(self, model: nn.Module, batch: dict[str, Tensor]) -> list[NDArray[Any]]:
        """Return the records of each document of a batch."""
        logp = -on_host(self.token_losses(model, batch)).numpy()
        lengths = batch["length"].tolist()
        return [row[:length] for row, length in zip(logp, lengths, strict=True)]
