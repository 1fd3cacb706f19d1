"""Conversations as tokens; only the assistant's tokens are trained.

The chat template's ``{% generation %}`` tags mark them. Without tags they are found by prefixes: a
turn is what the template adds to the rendered conversation before it, including the generation
prompt. This requires that the template renders the beginning of a conversation the same whatever
follows, which is checked in each conversation.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.language.completions import first_ending_after, first_starting_at, with_offsets
from oneloop.tasks.language.kept_texts import keep_text
from oneloop.tasks.language.unwritten_texts import check_written

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_HINT = (
    "give one whose assistant turns are between {% generation %} and {% endgeneration %}: "
    "--task.chat_template FILE"
)
DAY = "2025-01-01"
"""date for templates that insert the current date, so that tokens do not depend on today's date"""
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer", "reasoning_content": "thoughts"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
]


class Chat:
    """A tokenizer's chat template for training.

    Args:
        tokenizer: a tokenizer of transformers.
        template: Jinja template to use instead of the tokenizer's template.
        day: date (YYYY-MM-DD) for a template that inserts the current date.

    Raises:
        ValueError: the template is missing, its tags do not enclose the answers, or the day is not
            a date.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, *, day: str = DAY) -> None:
        self.tokenizer = tokenizer
        try:
            self._day = datetime.fromisoformat(day)
        except ValueError as error:
            raise ValueError(f"task.day must be a date such as 2025-01-31, got {day!r}") from error

        # Choose the template: a given one, or the tokenizer's default one of several.
        default: Any = tokenizer.chat_template
        if isinstance(default, Mapping):
            default = default.get("default")
        if not (template or default):
            raise ValueError(
                "the tokenizer has no chat template; give a Jinja file with "
                "--task.chat_template FILE"
            )
        self.template: str = template or default

        # Collect the special tokens; some tokenizers list them only as added tokens.
        self.special = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
        added = tokenizer.added_tokens_decoder.items()
        self.special |= {number for number, token in added if token.special}

        # Tags say exactly which tokens are the assistant's.
        if self.marked:
            self.note = "the template's {% generation %} tags mark the assistant's tokens"
            self._check_marks()
            return

        # Without tags compare prefixes, if the template renders the beginning always the same.
        self.note = (
            "the assistant's tokens are found by comparing prefixes of the rendered template"
        )
        with suppress(ValueError):
            self._prefix_ranges(self.render(_PROBE), _PROBE, None)
            return

        # If it does not, TRL may have a version of it with tags.
        if template is not None or not find_spec("trl"):
            return
        from trl.chat_template_utils import get_training_chat_template

        with suppress(ValueError):  # TRL has no template for it
            trl_template = get_training_chat_template(tokenizer)
            if trl_template:
                self.template = trl_template
                self.note = (
                    "the chat template changes a turn when more follows: TRL's is used to train "
                    "with"
                )

    @property
    def marked(self) -> bool:
        """Whether the template marks the assistant's tokens with ``{% generation %}`` tags."""
        return _MARKED.search(self.template) is not None

    def render(self, messages: Sequence[Any], tools: Any = None, *, prompt: bool = False) -> str:
        """Return a conversation as text.

        Args:
            messages: messages with role and content, in transformers' format.
            tools: JSON schemas for the template.
            prompt: add the start of the assistant's next turn.
        """
        return self._rendered(messages, tools, prompt=prompt)[0]

    def prompt(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Return the tokens of a conversation that the assistant should answer."""
        render = partial(self.render, prompt=True)
        text = render(messages, tools)
        check_written(text, messages, tools, render)
        return with_offsets(self.tokenizer, text, add_special_tokens=False)[0]

    def encode(
        self,
        messages: Sequence[Any],
        tools: Any = None,
        *,
        given: int = 0,
        untrained: Collection[int] = (),
    ) -> NDArray[np.int32]:
        """Return the tokens of a conversation; untrained tokens are stored as bitwise complements.

        Args:
            messages: messages with role and content, in transformers' format.
            tools: JSON schemas for the template.
            given: number of leading messages that are a prompt and not trained.
            untrained: indices of more messages that are not trained.

        Raises:
            ValueError: the template raises, does not show what is trained, or ends a turn without
                a special token.
        """
        # Find the character ranges that are trained.
        text, spans = self._rendered(messages, tools, marks=self.marked)
        check_written(text, messages, tools, self.render)
        if not self.marked:
            spans = self._prefix_ranges(text, messages, tools, {*range(given), *untrained})
        elif given or untrained:
            spans = self._trained_ranges(text, spans, messages, tools, given, untrained)

        # Mark their tokens; a token that spans a border counts as inside.
        tokens, offsets = with_offsets(self.tokenizer, text, add_special_tokens=False)
        trained = np.zeros(len(tokens), dtype=bool)
        for start, stop in spans:
            first = first_ending_after(offsets, start)
            last = first_starting_at(offsets, stop)
            if first < last and offsets[first, 0] < start and tokens[first] in self.special:
                first += 1  # a header token that includes the blanks after it
            trained[first : self._end_of_turn(tokens, first, last)] = True
        array = np.array(tokens, dtype=np.int32)
        array = np.where(trained, array, ~array)
        for span in spans[:1]:
            keep_text(array.tolist(), text[slice(*span)], self.tokenizer)
        return array

    def _rendered(
        self,
        messages: Sequence[Any],
        tools: Any,
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text, and the character ranges that the template's tags mark."""
        import jinja2
        from transformers.utils.chat_template_utils import (
            _compile_jinja_template,
            render_jinja_template,
        )

        # Render; a template can raise anything.
        try:
            # transformers' strftime_now uses today's date and has no argument.
            if "strftime_now" in self.template:
                _compile_jinja_template(self.template).globals["strftime_now"] = self._day.strftime
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=tools or None,
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            why = " ".join(str(error).split())
            if not isinstance(error, jinja2.TemplateError):
                why = f"{type(error).__name__}: {why}"
            if any(message.get("tool_calls") for message in messages):
                why += " (arguments of tool calls are objects: write them with the filter tojson)"
            raise ValueError(f"the chat template raised an error: {why}") from error
        if not marks:
            return texts[0], []

        # Join adjacent ranges: a turn may have two tags.
        answers = list[tuple[int, int]]()
        for start, stop in spans[0]:
            if answers and answers[-1][1] == start:
                start = answers.pop()[0]
            answers.append((int(start), int(stop)))
        return texts[0], answers

    def _prefix_ranges(
        self,
        text: str,
        messages: Sequence[Any],
        tools: Any,
        untrained: Collection[int] = (),
    ) -> list[tuple[int, int]]:
        """Return the character ranges of the assistant's turns that are trained.

        A turn is what its message adds to the text of the messages before it. Raise ValueError if
        the template changes that text.
        """
        spans = []
        for index, message in enumerate(messages):
            if index in untrained or message["role"] != "assistant":
                continue
            if not index:
                raise ValueError(
                    "message 0 is from the assistant, so the start of its turn is unknown; put a "
                    "message before it, or drop it"
                )

            # Compare the text before the turn, the text through it, and the whole text.
            before = self.render(messages[:index], tools, prompt=True)
            through = text
            if index < len(messages) - 1:
                through = self.render(messages[: index + 1], tools)
            if not text.startswith(through) or not through.startswith(before):
                raise ValueError(
                    f"cannot find the assistant's tokens of message {index}: the template renders "
                    "earlier turns differently when more follow, and has no marks; TRL, if it is "
                    f"installed, has no training template for it; {_HINT}"
                )
            spans.append((len(before), len(through)))
        return spans

    def _trained_ranges(
        self,
        text: str,
        spans: list[tuple[int, int]],
        messages: Sequence[Any],
        tools: Any,
        given: int,
        untrained: Collection[int],
    ) -> list[tuple[int, int]]:
        """Return the marked ranges after a prompt of ``given`` messages that are trained.

        Raise ValueError if there are too few, or not one for each answer if some are not trained.
        """
        # The prompt ends where its text and that of the conversation differ.
        prompt = self.render(messages[:given], tools) if given else ""
        begin = len(commonprefix([text, prompt]))  # noqa: RUF071 by characters
        kept = [span for span in spans if span[0] >= begin]

        # Each turn of the assistant must have a mark, in the prompt and after it.
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        answers = [index for index in turns if index >= given]
        left = len(spans) - len(kept)
        if given and (left < len(turns) - len(answers) or len(kept) < len(answers)):
            raise ValueError(f"the chat template does not mark the end of the prompt; {_HINT}")
        if not untrained:
            return kept
        if len(kept) != len(answers):
            raise ValueError(
                f"the chat template marks {len(kept)} ranges for {len(answers)} answers, so "
                f"message {min(untrained)} cannot be left out; {_HINT}"
            )
        pairs = zip(kept, answers, strict=True)
        return [span for span, index in pairs if index not in untrained]

    def _check_marks(self) -> None:
        """Raise ValueError if the template's tags are not around the answers."""
        try:
            text, spans = self._rendered(_PROBE, None, marks=True)
        except ValueError:
            return  # the template does not support this test conversation
        for answer in ("first answer", "second answer"):
            if not any(answer in text[start:stop] for start, stop in spans):
                raise ValueError(
                    f"the {{% generation %}} tags do not enclose the answers ({answer!r} is "
                    "outside; a tag inside {% set %} gets wrong offsets); move them"
                )

    def _end_of_turn(self, tokens: Sequence[int], first: int, last: int) -> int:
        """Return the end of a turn's tokens: after its end token, before a line break.

        Raise ValueError if it has no end token, or if it is empty.
        """
        answer = self.tokenizer.decode(tokens[first:last])

        # The end token is the last special token; only blanks may follow it.
        end = first
        for position in range(first, last):
            if tokens[position] in self.special:
                end = position + 1
        if end == first or self.tokenizer.decode(tokens[end:last]).strip():
            advice = "end each turn with one"
            if self.marked:
                advice = "put it before {% endgeneration %}"
            if self.tokenizer.eos_token:
                advice += f" (this tokenizer's is {self.tokenizer.eos_token!r})"
            raise ValueError(
                f"no special token ends the answer ({answer[-40:]!r}), so the model would not "
                f"learn to stop; {advice} in --task.chat_template FILE"
            )

        # Some templates leave an answer out.
        content = [token for token in tokens[first:end] if token not in self.special]
        if not self.tokenizer.decode(content).strip():
            raise ValueError(
                f"the chat template does not write the assistant's answer ({answer!r}: only tool "
                "calls or thoughts?); use a template that writes them, or remove the row"
            )
        # With tags the template decides whether the line break after the end token is trained.
        return last if self.marked else end


def template_of(file: str) -> str:
    """Return the text of a template file.

    Raise ValueError if it cannot be read, or is not a Jinja template.
    """
    import jinja2
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
        _compile_jinja_template(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"task.chat_template {file!r} cannot be read: {error}") from error
    except jinja2.TemplateError as error:
        raise ValueError(f"task.chat_template {file!r} is not a Jinja template: {error}") from error
    return text
