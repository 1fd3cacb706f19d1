"""Supervised fine-tuning of a language model on the assistant's messages, or on completions."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.basics.generation import TEXTS
from oneloop.tasks.language.answer_rows import (
    NEEDS,
    AnswerRows,
    AnswerSettings,
    tokenizer_from_scratch,
)
from oneloop.tasks.language.completions import end_token_notes, ends_in
from oneloop.tasks.language.conversations import FLAGS, encoded
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.generation import TIES, NearTies, written
from oneloop.tasks.language.language_model import LanguageModel
from oneloop.tasks.language.sequences import IGNORE, Sample, Samples, ranges
from oneloop.tasks.language.text_metrics import DEFAULT, WritesTexts, check_text_metrics
from oneloop.tasks.language.token_rows import Data
from oneloop.tasks.rows.cached_arrays import Ragged, remark
from oneloop.tasks.rows.rows import Row

ANSWERS = (("messages",), ("prompt", "completion"))
"""keys of each kind of rows with answers, the first choice first"""


class SFT(WritesTexts, LanguageModel):
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

    needs = NEEDS
    more_columns: Mapping[str, str] = {}  # of a subclass, by key of the task
    more_kinds: Sequence[Sequence[str]] = ()  # of a subclass: keys of other kinds of rows

    def __init__(
        self,
        data: Data = "lessons",
        messages: str = "messages",
        prompt: str = "prompt",
        completion: str = "completion",
        flags: list[str] = [*FLAGS],  # noqa: B006
        answer: int = 64,
        text_metrics: list[str] = [*DEFAULT],  # noqa: B006
        pack: Literal["packed", "padded"] = "packed",
        **settings: Any,
    ) -> None:
        if answer < 1:
            raise ValueError(f"task.answer {answer} must be at least 1 token (common: 64)")
        check_text_metrics(text_metrics)
        answers = AnswerSettings(**settings)
        super().__init__(answers, packed=pack == "packed")
        self.answer = answer
        self.text_metrics = text_metrics
        self.flags = flags

        # Open the rows; cut, and pack their tokens.
        if self.name:
            self.tokenizer = self.known_tokenizer()
        else:
            self.tokenizer = self._new_tokenizer(answers.vocab)
        self.end = self.tokenizer.eos_token_id
        columns = {"messages": messages, "prompt": prompt, "completion": completion}
        columns |= self.more_columns
        kinds = [*ANSWERS, *self.more_kinds]
        encode = partial(encoded, flags=flags)
        rows = AnswerRows(data, columns, kinds, encode, answers, tokenizer=self.tokenizer)
        self._use_rows(rows, self._samples)
        self._data_notes += end_token_notes(self.ends, self.tokenizer)
        first = next(iter(self.samples.values()))
        self._data_notes.append(self._preview(first.document(0)))

    def _new_tokenizer(self, vocab: int) -> Any:
        """Return the tokenizer of a model from scratch."""
        return tokenizer_from_scratch(vocab)

    def _samples(self, split: str, texts: Ragged, content: Any) -> Samples:
        # Generation stops at the tokens that end answers in the training data.
        if split == "train":
            special = {self.end} if self.rows.chat is None else self.rows.chat.special
            self.ends = sorted({*self.ends, *ends_in(texts, special, self.tokenizer)})
        try:
            return self._spanned(texts, content, split, self.settings.overlong)
        except ValueError as error:
            raise ValueError(f"{error} (task.length)") from error

    def _preview(self, sample: NDArray[np.int32]) -> str:
        """Return a log line with the text of a sample, trained parts in «»."""
        # The first token is only an input.
        is_trained = np.append(False, sample[1:] >= 0)
        borders = np.flatnonzero(np.diff(is_trained)) + 1
        text = ""
        for part in np.split(np.arange(len(sample)), borders):
            piece = self.decode(token_ids(sample[part]).tolist())
            text += f"«{piece}»" if is_trained[part[0]] else piece
        share = 100 * is_trained[1:].mean()
        return f"a sample, with the trained text in «» ({share:.0f} % of it): {text!r}"

    def samples_of(self, data: str, *, labelled: bool) -> Samples:
        if labelled:
            return self._samples("all", *self.rows.tokens(data, self.rows.kinds, self.rows.encode))
        # Prompts, one text each, in order; the last token is not an input.
        encode = partial(_prompt, flags=self.flags, length=self.shape.length)
        texts, content = self.rows.tokens(data, [*ANSWERS, ("prompt",), *self.more_kinds], encode)
        return Samples(
            texts.values,
            *ranges(texts),
            content=content,
            notes=texts.notes,
            texts=texts.texts,
        )

    def collate(self, samples: list[Sample]) -> dict[str, Any]:
        batch = super().collate(samples)
        if not samples[0].is_row:
            batch["text"] = [sample.text for sample in samples]
        return batch

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
        ties = NearTies(self.ends)
        answers = written(model, prompts, count, ends=self.ends, ties=ties)
        texts = [self._answer(tokens) for tokens in answers.tolist()]
        return {"prompt": lengths, "written": answers, TEXTS: texts, TIES: ties.found}

    def predicted(self, batch: dict[str, Tensor], outputs: dict[str, Any]) -> dict[str, list[Any]]:
        """Return each sample's prompt, the model's answer and the reference answer.

        A sample with a reference answer also has metrics.
        """
        # Without a reference answer there are no metrics.
        metrics = super().predicted(batch, outputs)
        prompts = []
        for tokens, length in zip(batch["input"].tolist(), outputs["prompt"].tolist(), strict=True):
            prompts.append(self.decode(tokens[:length]))
        targets = self._references(batch)
        return {"prompt": prompts, "answer": outputs["texts"], "target": targets, **metrics}


def _prompt(row: Row, *, length: int, **more: Any) -> NDArray[np.int32]:
    """Return the tokens of a row that may have an answer; of a longer prompt only the end is kept.

    The answer is a target; the last token is not an input.

    Args:
        row: the row.
        length: maximum number of input tokens.
        more: other arguments of :func:`oneloop.tasks.language.conversations.encoded`.
    """
    tokens = encoded(row, **more, labelled=False)
    if len(tokens) <= length + 1:
        return tokens
    limit = f"{length:,} tokens"
    kept = "only the end of each prompt is used, without metrics"
    remark(f"are longer than {limit}: {kept}", f"{len(tokens):,} tokens")

    # Leave out the answer; ~0 is a placeholder for the last token, which the model does not read.
    targets = np.flatnonzero(tokens >= 0)
    end = targets[0] if len(targets) else -1
    return np.append(tokens[:end][-length:], np.int32(~0))
