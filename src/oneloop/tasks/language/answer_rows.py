"""Base class of the tasks on answers: rows of conversations, or of prompts with answers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from oneloop.tasks.language.chat import DAY, Chat, template_of
from oneloop.tasks.language.completions import end_of
from oneloop.tasks.language.conversations import (
    column_choices,
    encoded,
    holds_texts,
)
from oneloop.tasks.language.language_model import LanguageModel
from oneloop.tasks.language.models import SCRATCH, Architecture
from oneloop.tasks.language.sequences import Overlong
from oneloop.tasks.language.tokens import chat_tokenizer, tokenizer_key
from oneloop.tasks.packaged_rows import SPLITS, PackagedRows
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

_CACHE_VERSION = 2  # increase it if the tokens of a row change
Encode = Callable[..., Any]
"""a function of a row, with the arguments of :func:`oneloop.tasks.language.conversations.encoded`
"""


class AnswerRows(LanguageModel):
    """Opens the rows, finds the tokenizer and the chat template, and tokenizes the rows.

    Args:
        data: value of ``task.data``.
        columns: column names by key of the task, other than tools and system.
        packed: whether training samples have several documents.
        tools: optional column of tools (JSON schemas) for the chat template.
        system: optional column of the system prompt, which becomes the first message.
        held_out: share of the rows for each of validation and test, if the data set has no such
            split.
        split_by: what is drawn for missing splits: rows, by their content, or whole row groups of
            Parquet files, without reading them.
        window: megabytes of parquet rows in memory per process.
        chat_template: Jinja file to use instead of the tokenizer's chat template.
        day: date (YYYY-MM-DD) for chat templates that insert the current date.
        architecture: gpt2 or llama, for a model from scratch.
        vocab: vocabulary size of the bpe tokenizer from scratch.
        length: maximum targets of a sample, which has one token more (reward: maximum tokens).
        overlong: cut longer samples, split them into several, or drop them.
        unreadable: stop at a row that cannot be read, or skip such rows and list them in
            environment.json.
    """

    needs = SCRATCH | {
        "vocab": "model=null",
        "held_out": "data!=lessons",
        "split_by": "data!=lessons",
    }
    lessons = "lessons"  # name of the packaged rows
    flags: Sequence[str] = ()  # keys of a message with which data leave it out of training
    _ends: Sequence[int] = ()  # tokens that end answers besides the tokenizer's end token
    kinds: Sequence[Sequence[str]] = (("messages",), ("prompt", "completion"))
    """keys of each kind of rows, the first choice first"""

    def __init__(
        self,
        data: str | list[dict[str, Any]],
        columns: dict[str, str],
        *,
        packed: bool,
        tools: str = "tools",
        system: str = "system",
        held_out: float = 0.05,
        window: int = 256,
        chat_template: str | None = None,
        day: str = DAY,
        architecture: Architecture = "llama",
        vocab: int = 512,
        length: int = 256,
        overlong: Overlong = "cut",
        unreadable: Unreadable = "stop",
        split_by: SplitBy = "rows",
        **model: Any,
    ) -> None:
        super().__init__(
            packed=packed, length=length, dropout=0.0, architecture=architecture, **model
        )
        self.length = self.shape.length
        self.overlong = overlong
        self.window = window
        self.columns = {**columns, "tools": tools, "system": system}

        # Read the template; it is used only if a source has conversations.
        self._template = None if chat_template is None else template_of(chat_template)
        self._day = day
        self._chat: Chat | None = None
        if self.name:
            self.tokenizer = self.known_tokenizer()
        else:
            self.tokenizer = self._new_tokenizer(vocab)
        self.end = self.tokenizer.eos_token_id
        self._cache_key = [_CACHE_VERSION, tokenizer_key(self.tokenizer), self._template]

        self._sources = self._opened(data, held_out, unreadable, split_by)

    def _new_tokenizer(self, vocab: int) -> Any:
        """Return the tokenizer of a model from scratch."""
        texts = []
        for row in PackagedRows("lessons", "train"):
            texts += [message["content"] for message in row["messages"]]
        return chat_tokenizer(texts, vocab)

    def _encoded_sources(self) -> list[dict[str, tuple[Ragged, Any]]]:
        """Return the tokens of all splits of each source, and keys of their content."""
        texts = []
        for source in self._sources:
            texts.append(
                {split: self._encoded(source, rows) for split, rows in source.parts.items()}
            )
        self._data_notes += notes_of(self._sources)
        self.skipped_rows = skipped_rows(self._sources)
        return texts

    def _choices(self, *, labelled: bool) -> Sequence[Mapping[str, str]]:
        """Return the columns that a source may have, the most complete choice first."""
        prompts = [] if labelled else [("prompt",)]
        return column_choices(self.columns, [*self.kinds, *prompts])

    def _encode(self, *, labelled: bool) -> Encode:
        """Return the function that makes tokens of a row."""
        return partial(encoded, labelled=labelled)

    def _encode_key(self) -> Sequence[Any]:
        """Return what this function depends on besides the rows: a part of the cache key."""
        return []

    def _opened(
        self,
        data: str | list[dict[str, Any]],
        held_out: float,
        unreadable: Unreadable,
        split_by: SplitBy,
    ) -> list[Source]:
        """Open the data sets that ``task.data`` names."""
        if data == "lessons":
            parts = {split: PackagedRows(self.lessons, split) for split in SPLITS}
            names = {name: name for name in parts["train"][0]}
            return [Source(data, dict.fromkeys(self.columns, "") | names, parts=parts)]
        open_ = partial(opened, held_out=held_out, window=self.window)
        sources = []
        named = named_sources(
            data, self.columns, unreadable=unreadable, split_by=split_by, remote=False
        )
        for source in named:
            source.optional = ("tools", "system")
            sources.append(first_columns(source, self._choices(labelled=True), open_))
        return sources

    def _chat_of(self, rows: Any, columns: Mapping[str, str]) -> Chat | None:
        """Return the chat template, or None if the first prompt or answer is a text."""
        # A prompt that is a text may stand beside answers that are messages.
        keys = [key for key in ("text", "chosen", "prompt") if columns.get(key)]
        if not columns.get("messages") and holds_texts(rows, columns[keys[0]]):
            end_of(self.tokenizer)  # raises ValueError if there is none
            note = "prompts and completions are concatenated unchanged"
            if self.tokenizer.chat_template:
                note += ", without the chat template: for turns give messages"
            if note not in self._data_notes:
                self._data_notes.append(note)
            return None
        if self._chat is None:
            self._chat = Chat(self.tokenizer, self._template, day=self._day)
            self._data_notes.append(self._chat.note)
        return self._chat

    def _encoded(self, source: Source, rows: Any, *, labelled: bool = True) -> tuple[Ragged, Any]:
        """Return the tokens of the rows of one split, and a key of their content."""
        columns = source.columns
        # Pairs without any prompt in their column, in all splits, begin with the same text.
        if columns.get("chosen") and columns.get("prompt"):
            # Packaged rows have no types.
            types = [getattr(part, "types", {}) for part in source.parts.values()]
            kinds = [known.get(columns["prompt"]) for known in types]
            if all(getattr(kind, "dtype", "") == "null" for kind in kinds):
                columns = {**columns, "prompt": ""}
        chat = self._chat_of(rows, columns)

        # The cache key names all that the tokens of a row depend on.
        named = {key: name for key, name in columns.items() if name or key != "system"}
        cache_key = [*self._cache_key, chat and chat.template, named, labelled]
        cache_key += [*self._encode_key(), *self.flags]
        if chat and "strftime_now" in chat.template:
            cache_key.append(self._day)
        content = {**rows.fingerprint(), "made by": key_of(cache_key)}

        encode = partial(
            self._encode(labelled=labelled),
            columns=columns,
            tokenizer=self.tokenizer,
            chat=chat,
            flags=self.flags,
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

    def _new_rows(self, data: str, *, labelled: bool) -> tuple[Ragged, Any]:
        """Return the tokens of other data, and a key of their content."""
        local_only(data)
        open_ = partial(whole, window=self.window)
        source = first_columns(Source(data, self.columns), self._choices(labelled=labelled), open_)
        return self._encoded(source, source.parts["all"], labelled=labelled)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model, and the tokenizer with the chat template of the run."""
        self.save_model(model, folder, ends=self._ends)
        if self._template is not None:
            self.tokenizer.chat_template = self._template
        self.tokenizer.save_pretrained(folder)

    @property
    def entries(self) -> int:
        return len(self.tokenizer)
