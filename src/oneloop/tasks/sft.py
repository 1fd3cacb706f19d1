"""Supervised fine-tuning of a language model on the assistant's messages, or on completions."""

from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oneloop.data.fingerprint import of_shuffled
from oneloop.tasks.language.chat import DAY, Chat, template_of
from oneloop.tasks.language.completions import end_of, end_token_notes, ends_in
from oneloop.tasks.language.conversations import (
    check_system,
    column_choices,
    encoded,
    encoded_prompt,
    first_value,
    is_text,
)
from oneloop.tasks.language.generation import answered
from oneloop.tasks.language.language_model import LanguageModel, is_packed
from oneloop.tasks.language.message_flags import FLAGS, keys_of
from oneloop.tasks.language.models import SCRATCH, Architecture
from oneloop.tasks.language.sequences import (
    IGNORE,
    Overlong,
    Packed,
    Padded,
    Prompts,
    token_ids,
)
from oneloop.tasks.language.synthetic_chats import LESSONS, SyntheticChats
from oneloop.tasks.language.text_metrics import (
    DEFAULT,
    check_text_metrics,
    text_metrics,
    update_texts,
)
from oneloop.tasks.language.tokens import chat_tokenizer, tokenizer_key
from oneloop.tasks.rows.cache import key_of
from oneloop.tasks.rows.cached_arrays import Ragged, ragged
from oneloop.tasks.rows.open_data import (
    Source,
    SplitBy,
    Unreadable,
    first_columns,
    local_only,
    named_sources,
    note_skipped,
    notes_of,
    opened,
    skipped_rows,
    whole,
)

_CACHE_VERSION = 1  # increase it if the tokens of a row change


class SFT(LanguageModel):
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
        tools: optional column of tools (JSON schemas) for the chat template.
        system: optional column of the system prompt, which becomes the first message.
        flags: keys of a message with which data leave it out of training (0 or false); [] ignores
            them.
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        window: megabytes of parquet rows in memory per process.
        chat_template: Jinja file to use instead of the tokenizer's chat template.
        day: date (YYYY-MM-DD) for chat templates that insert the current date.
        architecture: gpt2 or llama, for a model from scratch.
        vocab: vocabulary size of the bpe tokenizer from scratch.
        length: maximum tokens per sample.
        answer: maximum tokens of a generated answer (report, oneloop predict, eval.generate).
        text_metrics: metrics of generated answers (eval.generate): exact_match, bleu, chrf, rouge1,
            rouge2, rougeL or rougeLsum.
        overlong: cut longer samples, split them into several, or drop them.
        unreadable: stop at a row that cannot be read, or skip such rows and list them in
            environment.json.
        pack: packed (several samples per row; none attends to another) or padded (one sample per
            row; the samples of a step have similar lengths).
    """

    needs = SCRATCH | {
        "vocab": "model=null",
        "held_out": "data!=lessons",
        "split_by": "data!=lessons",
    }

    def __init__(
        self,
        data: str | list[dict[str, Any]] = "lessons",
        messages: str = "messages",
        prompt: str = "prompt",
        completion: str = "completion",
        tools: str = "tools",
        system: str = "system",
        flags: list[str] = [*FLAGS],  # noqa: B006
        held_out: float = 0.05,
        window: int = 256,
        chat_template: str | None = None,
        day: str = DAY,
        architecture: Architecture = "llama",
        vocab: int = 512,
        length: int = 256,
        answer: int = 64,
        text_metrics: list[str] = [*DEFAULT],  # noqa: B006
        overlong: Overlong = "cut",
        unreadable: Unreadable = "stop",
        split_by: SplitBy = "rows",
        pack: Literal["packed", "padded"] = "packed",
        **model: Any,
    ) -> None:
        packed = is_packed(pack, "packed", "padded")
        super().__init__(
            packed=packed, length=length, dropout=0.0, architecture=architecture, **model
        )
        if answer < 1:
            raise ValueError(f"task.answer {answer} must be at least 1 token (common: 64)")
        check_text_metrics(text_metrics)
        self.length = self.shape.length
        self.answer = answer
        self.text_metrics = text_metrics
        self.overlong = overlong
        self.window = window
        self.columns = {
            "messages": messages,
            "prompt": prompt,
            "completion": completion,
            "tools": tools,
            "system": system,
        }
        self.flags = flags

        # Read the template; it is used only if a source has conversations.
        self._template = None if chat_template is None else template_of(chat_template)
        self._day = day
        self._chat: Chat | None = None
        if self.name:
            self.tokenizer = self.known_tokenizer()
        else:
            self.tokenizer = chat_tokenizer(SyntheticChats("train").texts(), vocab)
        self.end = self.tokenizer.eos_token_id
        self._cache_key = [_CACHE_VERSION, tokenizer_key(self.tokenizer), self._template]

        # Tokenize all splits of all sources.
        sources = self._sources(data, held_out, unreadable, split_by)
        texts = []
        for source in sources:
            splits = {split: self._encoded(source, rows) for split, rows in source.parts.items()}
            texts.append(splits)
        self._data_notes += notes_of(sources)
        self.skipped_rows = skipped_rows(sources)

        # Cut and pack them.
        samples = []
        for splits in texts:
            samples.append({split: self._samples(*text, split) for split, text in splits.items()})
        self._use(sources, samples)

        # Generation stops at the tokens that end answers in the training data.
        special = {self.end} if self._chat is None else self._chat.special
        ends = set[int]()
        for splits in texts:
            ends |= ends_in(splits["train"][0], special, self.tokenizer)
        self._ends = sorted(ends)
        self._data_notes += end_token_notes(self._ends, self.tokenizer)
        self._data_notes.append(self._preview(samples[0]["train"].spans[0]))
        self.notes = self._data_notes

    writes = True
    counts_whole_texts = True

    def _sources(
        self,
        data: str | list[dict[str, Any]],
        held_out: float,
        unreadable: Unreadable,
        split_by: SplitBy,
    ) -> list[Source]:
        """Open the data sets that ``task.data`` names."""
        if data == "lessons":
            columns = dict.fromkeys(self.columns, "") | {"messages": "messages"}
            parts = {split: SyntheticChats(split) for split in LESSONS}
            return [Source("lessons", columns, parts=parts)]
        open_ = partial(opened, held_out=held_out, window=self.window)
        sources = []
        named = named_sources(
            data, self.columns, unreadable=unreadable, split_by=split_by, remote=False
        )
        for source in named:
            source.optional = ("tools", "system")
            choices = column_choices(source.columns)
            sources.append(first_columns(source, choices, open_))
        return sources

    def _encoded(self, source: Source, rows: Any, *, labelled: bool = True) -> tuple[Ragged, Any]:
        """Return the tokens of the rows of one split, and a key of their content."""
        # Use the chat template unless the first prompt is a text.
        columns = source.columns
        first_prompt = first_value(rows, columns["prompt"] or columns["messages"])
        chat: Chat | None = None
        if columns["prompt"] and is_text(first_prompt):
            end_of(self.tokenizer)  # raises ValueError if there is none
            note = "prompts and completions are concatenated unchanged"
            if self.tokenizer.chat_template:
                note += ", without the chat template: for turns give messages"
            if note not in self._data_notes:
                self._data_notes.append(note)
        else:
            if self._chat is None:
                self._chat = Chat(self.tokenizer, self._template, day=self._day)
                self._data_notes.append(self._chat.note)
            chat = self._chat

        # The cache key names all that the tokens of a row depend on.
        named = {key: name for key, name in columns.items() if name or key != "system"}
        cache_key = [*self._cache_key, chat and chat.template, named, labelled]
        if chat and "strftime_now" in chat.template:
            cache_key.append(self._day)
        content = {**of_shuffled(rows.fingerprint()), "made by": key_of(cache_key)}

        check_system(source, rows)
        keys = keys_of(rows, columns, chat, self.flags)
        content |= keys.read_since
        cache_key += keys.read_since.items()
        if keys.calls or keys.flags:
            cache_key.append([keys.calls, *keys.flags])  # older versions did not check these
        encode = partial(
            encoded if labelled else encoded_prompt,
            columns=columns,
            tokenizer=self.tokenizer,
            chat=chat,
            flags=keys.flags,
        )

        # Do not skip rows of ``oneloop predict``: each row needs its answer.
        skip = source.skipped is not None and source.parts.keys() != {"all"}
        texts = ragged(
            rows, encode, made_by=cache_key, what=f"tokenizing {source.where}", skip=skip
        )
        left_out = note_skipped(source, rows, texts.skipped)
        if left_out:
            content["skipped"] = key_of(left_out)
        return texts, content

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
        local_only(data)
        choices = column_choices(self.columns, labelled=labelled)
        open_ = partial(whole, window=self.window)
        source = first_columns(Source(data, self.columns), choices, open_)
        texts, content = self._encoded(source, source.parts["all"], labelled=labelled)
        if labelled:
            return cast(Padded, self._samples(texts, content, "all"))
        return Prompts(texts, self.length, content)

    @property
    def entries(self) -> int:
        return len(self.tokenizer)

    def save(self, model: nn.Module, folder: Path) -> None:
        self.save_model(model, folder, ends=self._ends)
        if self._template is not None:
            self.tokenizer.chat_template = self._template
        self.tokenizer.save_pretrained(folder)

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
        references = [self._first_answer(target) or "" for target in batch["target"].tolist()]
        update_texts(metrics, texts, references)

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
        return {"prompt": prompts, "answer": answers, "target": targets, **metrics}

    def _first_answer(self, target: list[int]) -> str | None:
        """Return the first trained answer of a sample as text; None if there is none."""
        answer_tokens = []
        for token in target:
            if token != IGNORE:
                answer_tokens.append(token)
            elif answer_tokens:
                break
        if not answer_tokens:
            return None
        return self._answer(answer_tokens)

    def _answer(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
