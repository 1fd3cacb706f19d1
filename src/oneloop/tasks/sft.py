"""Supervised fine-tuning of a language model on the assistant's messages, or on completions."""

from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.tasks.language.answer_rows import AnswerRows
from oneloop.tasks.language.completions import end_token_notes, ends_in
from oneloop.tasks.language.conversations import FLAGS
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.generation import answered
from oneloop.tasks.language.kept_texts import first_answer, references
from oneloop.tasks.language.language_model import is_packed
from oneloop.tasks.language.sequences import IGNORE, Packed, Padded, Prompts
from oneloop.tasks.language.text_metrics import (
    DEFAULT,
    check_text_metrics,
    text_metrics,
    update_texts,
)
from oneloop.tasks.rows.cached_arrays import Ragged


class SFT(AnswerRows):
    """Fine-tuning on conversations, or on prompts and completions.

    The weight of a sample is its number of trained tokens: the assistant's answers with their end
    tokens, or the completion.

    Args:
        data: lessons (synthetic conversations); a file or folder of json lines, parquet or arrow;
            hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7}, …]. See held_out.
        messages: column of the conversations: lists of messages with role and content, or JSON text
            of such lists.
        prompt: column of the prompts (texts or messages), if the data has no conversations.
        completion: column of the completions.
        flags: keys of a message with which data leave it out of training (0 or false); [] ignores
            them.
        answer: maximum tokens of a generated answer (report, oneloop predict, eval.generate).
        text_metrics: metrics of generated answers (eval.generate): exact_match, bleu, chrf, rouge1,
            rouge2, rougeL or rougeLsum.
        pack: packed (several samples per row; none attends to another) or padded (one sample per
            row; the samples of a step have similar lengths).
    """

    more_columns: Mapping[str, str] = {}  # of a subclass, by key of the task
    writes = True
    counts_whole_texts = True

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "lessons",
        messages: str = "messages",
        prompt: str = "prompt",
        completion: str = "completion",
        flags: list[str] = [*FLAGS],  # noqa: B006
        answer: int = 64,
        text_metrics: list[str] = [*DEFAULT],  # noqa: B006
        pack: Literal["packed", "padded"] = "packed",
        **rows: Any,
    ) -> None:
        packed = is_packed(pack, "packed", "padded")
        if answer < 1:
            raise ValueError(f"task.answer {answer} must be at least 1 token (common: 64)")
        check_text_metrics(text_metrics)
        columns = {"messages": messages, "prompt": prompt, "completion": completion}
        columns |= self.more_columns
        super().__init__(data, columns, packed=packed, **rows)
        self.answer = answer
        self.text_metrics = text_metrics
        self.flags = flags

        # Tokenize all splits of all sources; cut and pack them.
        texts = self._encoded_sources()
        samples = []
        for splits in texts:
            samples.append({split: self._samples(*text, split) for split, text in splits.items()})
        self.parts = samples
        self._use(self._sources, samples)

        # Generation stops at the tokens that end answers in the training data.
        special = {self.end} if self._chat is None else self._chat.special
        ends = set[int]()
        for splits in texts:
            ends |= ends_in(splits["train"][0], special, self.tokenizer)
        self._ends = sorted(ends)
        self._data_notes += end_token_notes(self._ends, self.tokenizer)
        self._data_notes.append(self._preview(samples[0]["train"].spans[0]))
        self.notes = self._data_notes

    def _samples(self, texts: Ragged, content: Any, split: str) -> Padded | Packed:
        try:
            return self._spanned(texts, content, split, self.overlong)
        except ValueError as error:
            raise ValueError(f"{split}: {error} (task.length)") from error

    def _preview(self, sample: NDArray[np.int32]) -> str:
        """Return a log line with the text of a sample, trained parts in «»."""
        text = ""
        trained_tokens = 0
        inside = False
        for index, token in enumerate(token_ids(sample).tolist()):
            # The first token is only an input.
            trained = index > 0 and bool(sample[index] >= 0)
            if trained != inside:
                text += "«" if trained else "»"
            inside = trained
            trained_tokens += trained
            text += self.decode([token])
        if inside:
            text += "»"
        share = trained_tokens / (len(sample) - 1)
        return f"a sample, with the trained text in «» ({100 * share:.0f} % of it): {text!r}"

    def samples_of(self, data: str, *, labelled: bool) -> Padded:
        texts, content = self._new_rows(data, labelled=labelled)
        if labelled:
            return cast(Padded, self._samples(texts, content, "all"))
        return Prompts(texts, self.length, content)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        if isinstance(samples[0], list):
            return self._collated(samples)
        # A sample has the text of its answer if the tokens do not give it back.
        pairs = [sample if isinstance(sample[-1], str) else (sample, "") for sample in samples]
        tokens, texts = zip(*pairs, strict=True)
        return {**self._collated([*tokens]), "text": [*texts]}

    def _collated(self, samples: list[Any]) -> dict[str, Tensor]:
        """Return samples without texts as one batch."""
        return super().collate(samples)

    def show(self, sample: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        while isinstance(sample, tuple):
            sample = sample[0]
        return super().show(sample, outputs)

    def generate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        """Return the greedy answer to the tokens before each sample's first target.

        All answers have the same length.
        """
        is_target = batch["target"] != IGNORE
        first_target = is_target.int().argmax(1)
        lengths = torch.where(is_target.any(1), first_target + 1, batch["length"])

        # Keep the end of a prompt if prompt and answer exceed the model's positions.
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        limit = getattr(config, "max_position_embeddings", None) or self.length + self.answer
        count = max(1, min(self.answer, limit // 2))
        prompts = []
        for row, length in zip(batch["input"], lengths.tolist(), strict=True):
            prompts.append(row[:length][count - limit :])
        made = answered(model, prompts, count, ends=self._ends, decode=self._answer)
        return {"prompt": lengths, **made}

    def generated_metrics(self) -> Any:
        return text_metrics(self.text_metrics)

    def update_generated(self, metrics: Any, batch: dict[str, Tensor], texts: list[str]) -> None:
        """Compare each answer with the first answer of its conversation."""
        decoded = [self._first_answer(target) or "" for target in batch["target"].tolist()]
        update_texts(metrics, batch, texts, references(batch, decoded))

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, list[Any]]:
        """Return each sample's prompt, the model's answer and the reference answer.

        A sample with a reference answer also has metrics.
        """
        # Without a reference answer there are no metrics.
        metrics = super().predicted(batch, outputs)
        rows = zip(
            batch["input"].tolist(),
            batch["target"].tolist(),
            outputs["prompt"].tolist(),
            outputs["texts"],
            strict=True,
        )
        prompts = []
        answers = []
        targets = list[str | None]()
        for tokens, target, length, answer in rows:
            prompts.append(self.decode(tokens[:length]))
            answers.append(answer)
            targets.append(self._first_answer(target))
        targets = references(batch, targets)
        return {"prompt": prompts, "answer": answers, "target": targets, **metrics}

    def _first_answer(self, target: list[int]) -> str | None:
        """Return the first trained answer of a sample as text; None if there is none."""
        tokens = first_answer(target)
        return self._answer(tokens) if tokens else None

    def _answer(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
