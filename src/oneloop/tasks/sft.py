"""Supervised fine-tuning of a language model, on conversations or on completions."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.data.rows.cache import key_of
from oneloop.data.rows.cached_arrays import Ragged, ragged
from oneloop.data.rows.open_data import (
    Source,
    combined,
    first_columns,
    named_sources,
    notes_of,
    opened,
    whole,
)
from oneloop.tasks.evaluation_metrics import TextSums
from oneloop.tasks.language.chat import DAY, Chat, template_of
from oneloop.tasks.language.completions import end_of, end_token_notes, ends_in
from oneloop.tasks.language.conversations import encoded, encoded_prompt, is_text
from oneloop.tasks.language.generation import written
from oneloop.tasks.language.language_model import LanguageModel, is_packed
from oneloop.tasks.language.models import SCRATCH, Architecture
from oneloop.tasks.language.sequences import (
    IGNORE,
    Overlong,
    Packed,
    Padded,
    Prompts,
    collated,
    spans,
)
from oneloop.tasks.language.synthetic_chats import LESSONS, SyntheticChats
from oneloop.tasks.language.tokens import chat_tokenizer, tokenizer_key

_CACHE_VERSION = 1  # increase it if the tokens of a row change


class SFT(LanguageModel):
    """Fine-tuning on conversations, or on prompts and completions. The weight of a sample is its
    number of trained tokens: the assistant's answers with their end tokens, or the completion.

    Args:
        data: lessons (synthetic conversations); a file or folder of json lines, parquet or arrow;
            hf:NAME[:CONFIG][@REVISION]; or several, [{data: PATH, weight: 0.7}, …]. See held_out.
        messages: column of the conversations: lists of messages with role and content, or JSON text
            of such lists.
        prompt: column of the prompts (texts or messages), if the data has no conversations.
        completion: column of the completions.
        tools: optional column of tools (JSON schemas) for the chat template.
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        window: megabytes of parquet rows in memory per process.
        chat_template: Jinja file to use instead of the tokenizer's chat template.
        day: date (YYYY-MM-DD) for chat templates that insert the current date.
        architecture: gpt2 or llama, for a model from scratch.
        vocab: vocabulary size of the bpe tokenizer from scratch.
        length: maximum tokens per sample.
        answer: maximum tokens of a generated answer (report, oneloop predict).
        overlong: cut longer samples, split them into several, or drop them.
        unreadable: stop at a row that cannot be read, or skip such rows and list them in
            environment.json.
        pack: packed (several samples per row; none attends to another) or padded (one sample per
            row; the samples of a step have similar lengths).
    """

    needs = SCRATCH | {"vocab": "model=null", "held_out": "data!=lessons"}

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "lessons",
        messages: str = "messages",
        prompt: str = "prompt",
        completion: str = "completion",
        tools: str = "tools",
        held_out: float = 0.05,
        window: int = 256,
        chat_template: str | None = None,
        day: str = DAY,
        architecture: Architecture = "llama",
        vocab: int = 512,
        length: int = 256,
        answer: int = 64,
        overlong: Overlong = "cut",
        unreadable: Literal["stop", "skip"] = "stop",
        pack: Literal["packed", "padded"] = "packed",
        **model: Any,
    ) -> None:
        packed = is_packed(pack, "packed", "padded")
        super().__init__(
            packed=packed, length=length, dropout=0.0, architecture=architecture, **model
        )
        if answer < 1:
            raise ValueError(f"task.answer {answer} must be at least 1 token (common: 64)")
        # Keep the settings.
        self.length = length
        self.answer = answer
        self.overlong = overlong
        self.window = window
        self.columns = {
            "messages": messages,
            "prompt": prompt,
            "completion": completion,
            "tools": tools,
        }

        # Take the tokenizer of the model, or learn one from the synthetic conversations.
        self._template = None if chat_template is None else template_of(chat_template)
        if self.name:
            self.tokenizer = self.known_tokenizer()
        else:
            self.tokenizer = chat_tokenizer(_texts(SyntheticChats("train")), vocab)
        self.end = self.tokenizer.eos_token_id
        self._day = day
        # The first data set that needs the chat template makes it.
        self._chat: Chat | None = None
        self._skip_unreadable = unreadable == "skip"
        self.skipped_rows = list[str]()
        self._cache_key = [_CACHE_VERSION, tokenizer_key(self.tokenizer), self._template]

        # Read the data.
        self._read(self._sources(data, held_out))
        self.notes = self._data_notes

    writes = True

    def _read(self, sources: Sequence[Source]) -> None:
        """Encode the sources, and make the data sets of all splits."""
        # Encode the rows of all splits.
        texts = []
        for source in sources:
            parts = source.parts.items()
            texts.append({split: self._encoded(source, rows) for split, rows in parts})
        self._data_notes += notes_of(sources)
        if self.skipped_rows:
            self._data_notes.append(
                f"{len(self.skipped_rows):,} rows were skipped and listed in environment.json; "
                f"the first: {self.skipped_rows[0]}"
            )

        # Cut them into samples.
        samples = []
        for splits in texts:
            samples.append({split: self._samples(*text, split) for split, text in splits.items()})
        self._sets = combined(sources, samples)
        self._max_documents = max(getattr(sets["train"], "most", 1) for sets in samples)
        if len(sources) > 1 and not self.packed:
            self._data_notes.append(
                "a mixture defines its own order: samples are not sorted by length (more padding)"
            )

        # Find the tokens that end an answer.
        special = {self.tokenizer.eos_token_id} if self._chat is None else self._chat.special
        ends = set[int]()
        for splits in texts:
            trained, _ = splits["train"]
            ends |= ends_in(trained, special, self.tokenizer)
        self._ends = sorted(ends)
        self._data_notes += end_token_notes(self._ends, self.tokenizer)
        self._data_notes.append(self._preview(samples[0]["train"].spans[0]))

    def _sources(self, data: str | list[dict[str, Any]], held_out: float) -> list[Source]:
        if data == "lessons":
            columns = dict.fromkeys(self.columns, "") | {"messages": "messages"}
            parts = {split: SyntheticChats(split) for split in LESSONS}
            return [Source("lessons", columns, parts=parts)]
        open_ = partial(opened, held_out=held_out, window=self.window)
        sources = []
        for source in named_sources(data, self.columns):
            choices = self._column_choices(source.columns)
            sources.append(first_columns(source, choices, open_))
        return sources

    @staticmethod
    def _column_choices(
        columns: Mapping[str, str], *, labelled: bool = True
    ) -> list[dict[str, str]]:
        """Return the sets of columns that a source may have, the preferred ones first."""
        none = dict.fromkeys(columns, "")
        kinds = [
            ("messages", "tools"),
            ("messages",),
            ("prompt", "completion", "tools"),
            ("prompt", "completion"),
        ]
        if not labelled:
            kinds += [("prompt", "tools"), ("prompt",)]
        return [none | {key: columns[key] for key in kind} for kind in kinds]

    def _encoded(self, source: Source, rows: Any, *, labelled: bool = True) -> tuple[Ragged, Any]:
        """Return the tokens of each row (cached), and what they depend on."""
        # Use the chat template, except for prompts that are texts.
        columns = source.columns
        prompt = columns["prompt"] or columns["messages"]
        prompts = (rows[index][prompt] for index in range(len(rows)))
        first_prompt = next((value for value in prompts if value), None)
        chat = None
        if not (columns["prompt"] and is_text(first_prompt)):
            if self._chat is None:
                self._chat = Chat(self.tokenizer, self._template, day=self._day)
                self._data_notes.append(self._chat.note)
            chat = self._chat
        else:
            end_of(self.tokenizer)  # raises ValueError if there is none
            note = "prompts and completions are concatenated unchanged"
            if self.tokenizer.chat_template:
                note += ", without the chat template: for turns give messages"
            if note not in self._data_notes:
                self._data_notes.append(note)

        # Name what the tokens depend on.
        cache_key = [*self._cache_key, chat and chat.template, dict(columns), labelled]
        if chat and "strftime_now" in chat.template:
            cache_key.append(self._day)
        content = {**rows.fingerprint(), "made by": key_of(cache_key)}

        # Encode the rows, or read them from the cache.
        encode = partial(
            encoded if labelled else encoded_prompt,
            columns=columns,
            tokenizer=self.tokenizer,
            chat=chat,
        )
        skip = self._skip_unreadable and source.parts.keys() != {"all"}
        texts = ragged(
            rows, encode, made_by=cache_key, what=f"tokenizing {source.where}", skip=skip
        )
        if texts.skipped:
            content["skipped"] = key_of([index for index, _ in texts.skipped])
            self.skipped_rows += [f"{rows.where(index)}: {why}" for index, why in texts.skipped]
        return texts, content

    def _samples(self, texts: Ragged, content: Any, split: str) -> Padded | Packed:
        try:
            samples = spans(texts, self.length, self.overlong)
        except ValueError as error:
            raise ValueError(f"{split}: {error} (task.length)") from error
        self._data_notes += [f"{split}: {line}" for line in samples.about(self.overlong)]
        if self.packed and split == "train":
            return Packed(samples, content)
        return Padded(samples, content)

    def _preview(self, sample: NDArray[np.int32]) -> str:
        """Return the line for the log that shows a sample, with the trained text in «»."""
        pieces = list[str]()
        before = False  # whether the token before was trained
        tokens = sample.tolist()
        for token in [*tokens, None]:
            # The complement of a token is not trained, and the first token is never a target.
            trained = token is not None and token >= 0 and bool(pieces)
            if trained != before:
                pieces.append("«" if trained else "»")
            before = trained
            if token is not None:
                pieces.append(self.decode([token if token >= 0 else ~token]))
        share = sum(token >= 0 for token in tokens[1:]) / (len(tokens) - 1)
        return (
            f"a sample, with the trained text in «» ({100 * share:.0f} % of it): "
            f"{''.join(pieces)!r}"
        )

    def train_set(self) -> Any:
        return self._sets["train"]

    def eval_sets(self) -> dict[str, Any]:
        return {name: data_set for name, data_set in self._sets.items() if name != "train"}

    def samples_of(self, data: str, *, labelled: bool) -> Padded:
        choices = self._column_choices(self.columns, labelled=labelled)
        open_ = partial(whole, window=self.window)
        source = first_columns(Source(data, self.columns), choices, open_)
        texts, content = self._encoded(source, source.parts["all"], labelled=labelled)
        if not labelled:
            return Prompts(texts, self.length, content)
        return cast(Padded, self._samples(texts, content, "all"))

    def collate(self, samples: list[Any]) -> dict[str, Tensor]:
        return collated(
            samples,
            width=self.length if isinstance(samples[0], list) else 0,
            most=self._max_documents,
        )

    @property
    def entries(self) -> int:
        return len(self.tokenizer)

    def save(self, model: nn.Module, folder: Path) -> None:
        self.save_model(model, folder, ends=self._ends)
        if self._template is not None:
            self.tokenizer.chat_template = self._template
        self.tokenizer.save_pretrained(folder)

    def metrics(self) -> TextSums:
        return TextSums(by_bytes=False, whole=True)

    def update(
        self, metrics: TextSums, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> None:
        is_target = batch["target"] != IGNORE
        right = outputs["right"] & is_target
        exact = (right | ~is_target).all(1)
        metrics.update(
            outputs["loss"].double().sum(), is_target.sum(), right=right.sum(), whole=exact
        )

    def generate(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the greedy answer to the tokens before each sample's first target.

        All answers have the same length.
        """
        # Take the tokens up to the first target; all, if there is none.
        is_target = batch["target"] != IGNORE
        first = is_target.int().argmax(1)
        lengths = torch.where(is_target.any(1), first + 1, batch["length"])

        # Leave room for the answer: of a longer prompt only the end is kept.
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        limit = getattr(config, "max_position_embeddings", None) or self.length + self.answer
        count = max(1, min(self.answer, limit // 2))
        prompts = []
        for row, length in zip(batch["input"], lengths.tolist(), strict=True):
            prompts.append(row[:length][count - limit :])
        return {"written": written(model, prompts, count, ends=self._ends), "prompt": lengths}

    def predicted(
        self, batch: dict[str, Tensor], outputs: dict[str, Tensor]
    ) -> dict[str, list[Any]]:
        """Return each sample's prompt and the model's answer.

        If they are known, add the reference answer and its metrics.
        """
        # A sample without a reference answer has no metrics.
        metrics = super().predicted(batch, outputs)
        has_target = [tokens > 0 for tokens in metrics["tokens"]]
        for name, values in metrics.items():
            known = zip(values, has_target, strict=True)
            metrics[name] = [value if present else None for value, present in known]

        # Decode the texts.
        lengths = outputs["prompt"].tolist()
        prompts = []
        for tokens, length in zip(batch["input"].tolist(), lengths, strict=True):
            prompts.append(self.decode(tokens[:length]))
        answers = [self._answer(tokens) for tokens in outputs["written"].tolist()]
        targets = [self._first_answer(target) for target in batch["target"].tolist()]
        return {"prompt": prompts, "answer": answers, "target": targets, **metrics}

    def _first_answer(self, target: list[int]) -> str | None:
        """Return the first trained answer of a sample as text; None if there is none."""
        answer_tokens = list[int]()
        for token in target:
            if token != IGNORE:
                answer_tokens.append(token)
            elif answer_tokens:
                break
        return self._answer(answer_tokens) if answer_tokens else None

    def _answer(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def show(self, sample: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        trained = (sample[1:] >= 0).tolist()
        tokens = np.where(sample < 0, ~sample, sample).tolist()
        losses = outputs["loss"][: len(trained)].tolist()
        shown: dict[str, Any] = {"tokens": self.pieces(tokens, losses, trained)}
        if "written" in outputs:
            shown["prompt"] = self.decode(tokens[: int(outputs["prompt"])])
            shown["continuation"] = self._answer(outputs["written"].tolist())
        return shown

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


def _texts(chats: SyntheticChats) -> list[str]:
    return [message["content"] for messages in chats.conversations for message in messages]
