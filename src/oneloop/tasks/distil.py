"""Distillation: a student learns from a teacher's stored distributions over the next tokens."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.tasks.frozen.task import FrozenModel, FrozenTask
from oneloop.tasks.language.divergences import Divergence, divergence, merged
from oneloop.tasks.language.language_model import cross_entropy
from oneloop.tasks.language.sequences import (
    IGNORE,
    Sample,
    Samples,
    collated,
    records_of_targets,
)
from oneloop.tasks.language.teachers import checked_teacher, load_teacher, teacher_content
from oneloop.tasks.language.token_rows import Data
from oneloop.tasks.language.top_logits import collated_records, record_of, records
from oneloop.tasks.light_metrics import TextMeans
from oneloop.tasks.sft import SFT


class Distil(FrozenTask, SFT):
    """Distillation from a teacher whose outputs are computed once, and stored.

    The loss of a token is ``share x temperature^2 x divergence + (1 - share) x cross-entropy``
    (Hinton et al. 2015). The weight of a sample is its number of trained tokens, as in task sft.

    Args:
        teacher: a folder saved by transformers (final/ of a run is one), or hf:ID[@REVISION], in
            the dtype of its files; its tokenizer must have the student's vocabulary.
        text: column of whole texts, if the data has neither conversations nor completions; all
            their tokens are trained.
        top_k: entries of the teacher's distribution that are stored for each token; all others are
            one bucket, the tail (0: all entries).
        divergence: forward (KL from teacher to student), reverse, or js (Jensen-Shannon).
        beta: weight of the teacher in js, between 0 and 1.
        temperature: of both distributions.
        share: share of the divergence in the loss; the rest is the cross-entropy of the data.
        store: folder of the teacher's outputs (null: the cache of this host).
    """

    needs = SFT.needs | {"beta": "divergence=js"}
    more_kinds = (("text",),)
    frozen: FrozenModel

    def __init__(
        self,
        data: Data = "lessons",
        teacher: str = "",
        text: str = "text",
        top_k: int = 64,
        divergence: Divergence = "forward",
        beta: float = 0.5,
        temperature: float = 1.0,
        share: float = 0.5,
        store: str | None = None,
        **settings: Any,
    ) -> None:
        # Check the settings before the data and the teacher are read.
        if not 0 < temperature < math.inf:
            raise ValueError(f"task.temperature {temperature} must be a positive number")
        if not 0 < share <= 1:
            raise ValueError(
                f"task.share {share} must be above 0 and at most 1; to train without the teacher, "
                "use task sft"
            )
        if not 0 < beta < 1:
            raise ValueError(f"task.beta {beta} must be between 0 and 1")
        if settings.get("fused_loss") is True:
            raise ValueError("task.fused_loss true: distillation needs logits; remove it")
        self.kind: Divergence = divergence
        self.beta = beta
        self.temperature = temperature
        self.share = share
        self.teacher = teacher
        self.more_columns = {"text": text}
        self._teacher_tokenizer = checked_teacher(teacher)
        super().__init__(data, **settings)
        self._check_same_tokens()

        # Let a run compute what the teacher says about each trained token.
        if not 0 <= top_k <= self.entries:
            raise ValueError(
                f"task.top_k {top_k} must be from 1 to the {self.entries:,} entries of the "
                "vocabulary, or 0 for all"
            )
        self.top_k = top_k or self.entries
        self._record = record_of(self.top_k, self.entries)
        self.frozen = FrozenModel(
            "the teacher",
            {},
            batch=self._documents,
            compute=self._distributions,
            kind={
                "records": "most likely entries",
                "k": self.top_k,
                "entries": self.entries,
                "temperature": temperature,
                "attention": "transformers' default",
            },
            address=store,
            build=self._load_teacher,
            content=teacher_content(teacher),
        )
        for name, samples in self.samples.items():
            self.frozen.outputs[name] = samples.freeze(self._record, targets=True)
        self._data_notes.append(self.frozen.note)
        if self.top_k < self.entries:
            self._data_notes.append(
                f"the {self.top_k:,} most likely of {self.entries:,} entries and the sum of the "
                "others are compared: the divergence is a lower bound of that of all entries"
            )

    def _load_teacher(self) -> nn.Module:
        """Load the teacher. Raise ValueError if its files are others than at the start."""
        model = load_teacher(self.teacher, entries=self.entries, length=self.length)
        if teacher_content(self.teacher) != self.frozen.content:
            raise ValueError(
                f"task.teacher {self.teacher!r} has changed since the start, so its outputs would "
                "be stored as those of other weights; start again"
            )
        return model

    def _new_tokenizer(self, vocab: int) -> Any:
        # A student from scratch has the teacher's tokens.
        return self._teacher_tokenizer

    def _check_same_tokens(self) -> None:
        """Raise ValueError if the teacher reads the student's tokens as others."""
        mine = self.tokenizer.get_vocab()
        theirs = self._teacher_tokenizer.get_vocab()
        for token, number in mine.items():
            if theirs.get(token) != number:
                raise ValueError(
                    f"task.teacher {self.teacher!r} has another tokenizer: the student's token "
                    f"{token!r} is number {number}, and the teacher's "
                    f"{theirs.get(token, 'does not exist')}; give a teacher and a student with one "
                    "tokenizer"
                )
        other = self.tokenizer.chat_template != self._teacher_tokenizer.chat_template
        if self.rows.chat is not None and self.chat_template is None and other:
            raise ValueError(
                f"task.teacher {self.teacher!r} has another chat template than the student; name "
                "the one that both should see with task.chat_template FILE"
            )
        checked_teacher(self.teacher, entries=self.entries, length=self.length)

    def samples_of(self, data: str, *, labelled: bool) -> Samples:
        samples = super().samples_of(data, labelled=labelled)
        if labelled:
            self.samples["data"] = samples
            self.frozen.outputs["data"] = samples.freeze(self._record, targets=True)
        return samples

    def collate(self, samples: list[Sample]) -> dict[str, Any]:
        batch = super().collate(samples)
        # Rows of ``oneloop predict`` have no records.
        if samples[0].records:
            records = records_of_targets(samples)
            batch |= collated_records(records, batch["target"] != IGNORE, self.entries)
        return batch

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if "teacher" not in batch:
            return super().loss(model, batch)

        # Half-precision logits are too coarse for the loss; rows that pad the vocabulary have no
        # token.
        target = batch["target"]
        logits = model(**self._model_inputs(batch)).logits[..., : self.entries]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        of_data = cross_entropy(logits, target)

        # Compare the student with the teacher, at each target.
        student = merged(logits, batch["teacher_entry"], temperature=self.temperature)
        teacher = batch["teacher"].to(student.dtype)
        apart = divergence(teacher, student, self.kind, weight=self.beta)
        apart = apart * (target != IGNORE)
        scale = self.share * self.temperature**2
        each = scale * apart + (1 - self.share) * of_data

        outputs = {"loss": each.detach()}
        if model.training:
            count = (target != IGNORE).sum().clamp(min=1)
            outputs["divergence"] = apart.detach().sum() / count
            outputs["cross_entropy"] = of_data.detach().sum() / count
            if "padding" in batch:
                outputs["padding"] = batch["padding"]
        else:
            outputs["apart"] = apart.detach()
            outputs["cross_entropy"] = of_data.detach()
            outputs["right"] = logits.argmax(-1) == target
        return each.sum(), outputs

    def metrics(self) -> TextMeans:
        return TextMeans({**super().metrics().higher_is_better, "divergence": False})

    def update(
        self, metrics: TextMeans, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        # Perplexity is that of the data, not of the loss.
        super().update(metrics, batch, {**outputs, "loss": outputs["cross_entropy"]})

    def _documents(self, name: str, documents: Sequence[int]) -> dict[str, Tensor]:
        samples = self.samples[name]
        return collated([Sample([samples.document(number)]) for number in documents])

    def _distributions(self, model: nn.Module, batch: dict[str, Tensor]) -> list[NDArray[Any]]:
        """Return the records of the targets of each document."""
        logits = model(input_ids=batch["input"], use_cache=False).logits
        found = []
        for row, target in zip(logits, batch["target"], strict=True):
            of_targets = row[target != IGNORE][:, : self.entries]
            found.append(records(of_targets, self._record, temperature=self.temperature))
        return found
