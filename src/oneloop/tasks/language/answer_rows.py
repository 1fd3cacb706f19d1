"""Rows of the tasks on answers: conversations, prompts with answers, or pairs of answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from oneloop.tasks.language.chat import DAY, Chat, template_of
from oneloop.tasks.language.completions import end_of
from oneloop.tasks.language.conversations import column_choices, holds_texts
from oneloop.tasks.language.language_model import ModelSettings
from oneloop.tasks.language.models import SCRATCH, Architecture
from oneloop.tasks.language.sequences import Overlong, Samples
from oneloop.tasks.language.token_rows import (
    Data,
    MakeSamples,
    RowSettings,
    open_sources,
    samples_of_sources,
    tokens_of_new_rows,
)
from oneloop.tasks.language.tokens import chat_tokenizer
from oneloop.tasks.packaged_rows import PackagedRows
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.rows.open_data import Source

Encode = Callable[..., Any]
"""of a row, with the arguments of :func:`oneloop.tasks.language.conversations.encoded`"""
NEEDS = SCRATCH | {
    "vocab": "model=null",
    "held_out": "data!=lessons",
    "split_by": "data!=lessons",
}


@dataclass(frozen=True, kw_only=True)
class AnswerSettings(ModelSettings, RowSettings):
    """A language model that learns from answers, and how their rows are read.

    Args:
        tools: optional column of tools (JSON schemas) for the chat template.
        system: optional column of the system prompt, which becomes the first message.
        chat_template: Jinja file to use instead of the tokenizer's chat template.
        day: date (YYYY-MM-DD) for chat templates that insert the current date.
        vocab: vocabulary size of the bpe tokenizer from scratch.
        length: maximum targets of a sample, which has one token more (reward: maximum tokens).
        overlong: cut longer samples, split them into several, or drop them.
    """

    tools: str = "tools"
    system: str = "system"
    chat_template: str | None = None
    day: str = DAY
    vocab: int = 512
    length: int = 256
    overlong: Overlong = "cut"
    architecture: Architecture = "llama"
    dropout: float = field(default=0.0, init=False)


class AnswerRows:
    """Opens the rows, chooses the chat template, and makes the samples.

    Args:
        data: value of ``task.data``.
        columns: column names by key of the task, other than tools and system.
        kinds: keys of each kind of rows, the first choice first.
        encode: makes tokens of a row.
        settings: how rows are read.
        tokenizer: of the model.
        packaged: name of the packaged rows that ``lessons`` means.
    """

    def __init__(
        self,
        data: Data,
        columns: dict[str, str],
        kinds: Sequence[Sequence[str]],
        encode: Encode,
        settings: AnswerSettings,
        *,
        tokenizer: Any,
        packaged: str = "lessons",
    ) -> None:
        self.columns = {**columns, "tools": settings.tools, "system": settings.system}
        self.kinds = kinds
        self.encode = encode
        self.settings = settings
        self.tokenizer = tokenizer
        self.notes = list[str]()

        # Read the template; it is used only if a source has conversations.
        self.template = None
        if settings.chat_template is not None:
            self.template = template_of(settings.chat_template)
        self.chat: Chat | None = None
        self.sources = open_sources(
            data,
            settings,
            column_choices(self.columns, kinds),
            {"lessons": packaged},
            optional=("tools", "system"),
        )

    def samples(self, make: MakeSamples) -> list[dict[str, Samples]]:
        """Return the samples of each source by split. Raise ValueError if a row is malformed."""
        return samples_of_sources(self.sources, partial(self._encoder, self.encode), make)

    def tokens(
        self, data: str, kinds: Sequence[Sequence[str]], encode: Encode
    ) -> tuple[Ragged, Any]:
        """Return the tokens of other data, and a key of their content."""
        choices = column_choices(self.columns, kinds)
        encoder = partial(self._encoder, encode)
        return tokens_of_new_rows(data, choices, self.settings.window, encoder)

    def _encoder(self, encode: Encode, source: Source, rows: Any) -> tuple[partial[Any], Any]:
        """Return what makes tokens of a row, and what its chat template depends on."""
        columns = dict(source.columns)
        # Pairs without any prompt in their column, in all splits, begin with the same text.
        if columns.get("chosen") and columns.get("prompt"):
            # Packaged rows have no types.
            types = [getattr(part, "types", {}) for part in source.parts.values()]
            kinds = [by_column.get(columns["prompt"]) for by_column in types]
            if all(getattr(kind, "dtype", "") == "null" for kind in kinds):
                columns["prompt"] = ""
        chat = self._chat_of(rows, columns)
        encode = partial(encode, columns=columns, tokenizer=self.tokenizer, chat=chat)
        return encode, chat and [chat.template, self.settings.day]

    def _chat_of(self, rows: Any, columns: Any) -> Chat | None:
        """Return the chat template, or None if the first prompt or answer is a text."""
        # A prompt that is a text may stand beside answers that are messages.
        keys = [key for key in ("text", "chosen", "prompt") if columns.get(key)]
        if not columns.get("messages") and holds_texts(rows, columns[keys[0]]):
            end_of(self.tokenizer)  # raises ValueError if there is none
            note = "prompts and completions are concatenated unchanged"
            if self.tokenizer.chat_template:
                note += ", without the chat template: for turns give messages"
            if note not in self.notes:
                self.notes.append(note)
            return None
        if self.chat is None:
            self.chat = Chat(self.tokenizer, self.template, day=self.settings.day)
            self.notes.append(self.chat.note)
        return self.chat


def tokenizer_from_scratch(vocab: int) -> Any:
    """Return the tokenizer of a model from scratch, trained on the packaged conversations."""
    texts = []
    for row in PackagedRows("lessons", "train"):
        texts += [message["content"] for message in row["messages"]]
    return chat_tokenizer(texts, vocab)
