"""Conversations as tokens, of which those that the assistant says are trained.

What the assistant says is known from the chat template's ``{% generation %}`` marks; without them from prefixes: its
turn is what the template adds to the conversation before it, with the prompt for a generation. That holds where the
template renders a conversation's beginning the same whatever follows, which is looked at in each one.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.language.completions import first_behind, placed, upto

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FILE = "give one whose assistant turns are between {% generation %} and {% endgeneration %}: --task.chat_template FILE"
DAY = "2025-01-01"
"""today, for templates that write the date: their tokens must not depend on the day of training"""
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer", "reasoning_content": "thoughts"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
]


class Chat:
    """A tokenizer's chat template, as it is trained with.

    Args:
        tokenizer: of transformers.
        template: one to use instead of the tokenizer's own.
        day: YYYY-MM-DD: today, for a template that writes the date.

    Raises:
        ValueError: there is none, it ends no turn with a special token, or the day is none.
    """

    def __init__(self, tokenizer: Any, template: str | None = None, *, day: str = DAY) -> None:
        self.tokenizer = tokenizer
        try:
            self._day = datetime.fromisoformat(day)
        except ValueError as error:
            raise ValueError(f"task.day must be a date such as 2025-01-31, got {day!r}") from error
        own: Any = tokenizer.chat_template
        own = own.get("default") if isinstance(own, Mapping) else own
        if not (template or own):
            raise ValueError("the tokenizer has no chat template; give a Jinja file with --task.chat_template FILE")
        self.template: str = template or own
        self.note = "the template's {% generation %} tags mark the assistant's tokens"
        self.special = {tokenizer.eos_token_id, *tokenizer.all_special_ids}
        self.special |= {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        if self.marked:
            self._check_marks()
        else:
            self.note = "the assistant's tokens are found by comparing prefixes of the rendered template"
            if not self._keeps_prefixes() and (known := _of_trl(tokenizer, template)):
                self.template = known
                self.note = "the chat template changes a turn when more follows: TRL's is used to train with"

    @property
    def marked(self) -> bool:
        """Whether the template says which tokens the assistant generates."""
        return _MARKED.search(self.template) is not None

    def render(self, messages: Sequence[Any], tools: Any = None, *, prompt: bool = False) -> str:
        """The conversation as text; with the beginning of the assistant's next turn, where it is a ``prompt``."""
        return self._rendered(messages, tools, prompt=prompt)[0]

    def prompt(self, messages: Sequence[Any], tools: Any = None) -> list[int]:
        """Tokens of a conversation that the assistant is to answer."""
        text = self.render(messages, tools, prompt=True)
        return placed(self.tokenizer, text, add_special_tokens=False)[0]

    def encode(self, messages: Sequence[Any], tools: Any = None, *, given: int = 0) -> NDArray[np.int32]:
        """Tokens of a conversation; those that are not trained as their complements.

        Args:
            messages: of a role and content each, as transformers takes them.
            tools: JSON schemas that the template is given.
            given: so many of the messages are a prompt, of which nothing is trained.

        Raises:
            ValueError: the template rejects it, does not tell what is trained, or ends a turn without a special token.
        """
        text, spans = self._rendered(messages, tools, marks=self.marked)
        if not self.marked:
            spans = self._by_prefixes(text, messages, tools, given)
        elif given:
            spans = self._behind(text, spans, messages, tools, given)
        tokens, places = placed(self.tokenizer, text, add_special_tokens=False)
        trained = np.zeros(len(tokens), dtype=bool)
        for start, stop in spans:
            first, last = first_behind(places, start), upto(places, stop)
            if first < last and places[first, 0] < start and tokens[first] in self.special:
                first += 1  # a header that takes the blanks behind it
            trained[first : self._end(tokens, first, last)] = True
        found = np.array(tokens, dtype=np.int32)
        return np.where(trained, found, ~found)

    def _rendered(
        self, messages: Sequence[Any], tools: Any, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text, and from where to where the template's marks say that the assistant speaks."""
        import jinja2
        from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

        try:
            if "strftime_now" in self.template:  # transformers' own is of today, and no argument takes its place
                _compile_jinja_template(self.template).globals["strftime_now"] = self._day.strftime
            texts, spans = render_jinja_template(
                [list(messages)],
                tools=tools or None,
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:  # a template is a program
            kind = f"{type(error).__name__}: " if not isinstance(error, jinja2.TemplateError) else ""
            raise ValueError(f"the chat template raised an error: {kind}{' '.join(str(error).split())}") from error
        answers = list[tuple[int, int]]()
        for start, stop in spans[0] if marks else ():
            if answers and answers[-1][1] == start:  # a turn in two marks
                start = answers.pop()[0]
            answers.append((int(start), int(stop)))
        return texts[0], answers

    def _by_prefixes(self, text: str, messages: Sequence[Any], tools: Any, given: int) -> list[tuple[int, int]]:
        """From where to where the assistant speaks: what its turns add to what was before them."""
        spans = []
        for at, message in enumerate(messages):
            if at < given or message["role"] != "assistant":
                continue
            if not at:
                why = "message 0 is by the assistant, and the template's text before it is unknown"
                raise ValueError(f"{why}; put a message before it, or drop it")
            before = self.render(messages[:at], tools, prompt=True)
            upto = text if at == len(messages) - 1 else self.render(messages[: at + 1], tools)
            if not (text.startswith(upto) and upto.startswith(before)):
                why = "the template renders earlier turns differently when more follow, and has no marks"
                raise ValueError(f"cannot find the assistant's tokens of message {at}: {why}; {_way_out()}")
            spans.append((len(before), len(upto)))
        return spans

    def _behind(
        self, text: str, spans: list[tuple[int, int]], messages: Sequence[Any], tools: Any, given: int
    ) -> list[tuple[int, int]]:
        """Return the marked positions after a prompt of so many messages. Raises ValueError if there are too few."""
        begin = len(commonprefix([text, self.render(messages[:given], tools)]))  # noqa: RUF071 letter by letter
        kept = [(start, stop) for start, stop in spans if start >= begin]
        turns = [message["role"] == "assistant" for message in messages]
        if len(kept) < sum(turns[given:]) or len(spans) - len(kept) < sum(turns[:given]):
            raise ValueError(f"the chat template does not mark the end of the prompt; {_FILE}")
        return kept

    def _check_marks(self) -> None:
        try:
            text, spans = self._rendered(_PROBE, None, marks=True)
        except ValueError:
            return  # it wants other conversations
        for answer in ("first answer", "second answer"):
            if not any(answer in text[start:stop] for start, stop in spans):
                why = f"{answer!r} is outside; a mark inside {{% set %}} is counted from elsewhere"
                raise ValueError(f"the {{% generation %}} tags do not enclose the answers ({why}); move them")

    def _keeps_prefixes(self) -> bool:
        try:
            self._by_prefixes(self.render(_PROBE), _PROBE, None, 0)
        except ValueError:
            return False
        return True

    def _end(self, tokens: Sequence[int], first: int, last: int) -> int:
        """Return the end of a turn: after its stop token, before a line break. Raises ValueError if there is no such
        token."""
        whole = self.tokenizer.decode(tokens[first:last])
        ends = [at for at in range(first, last) if tokens[at] in self.special]
        end = ends[-1] + 1 if ends else first
        if not ends or self.tokenizer.decode(tokens[end:last]).strip():
            where = "put it before {% endgeneration %}" if self.marked else "end each turn with one"
            own = f" (this tokenizer's is {self.tokenizer.eos_token!r})" if self.tokenizer.eos_token else ""
            why = f"no special token ends the answer ({whole[-40:]!r}), so the model would not learn to stop"
            raise ValueError(f"{why}; {where}{own} in --task.chat_template FILE")
        plain = [token for token in tokens[first:end] if token not in self.special]
        if not self.tokenizer.decode(plain).strip():
            why = f"the chat template does not write the assistant's answer ({whole!r}: only tool calls or thoughts?)"
            raise ValueError(f"{why}; use a template that writes them, or remove the row")
        return last if self.marked else end


def template_of(file: str) -> str:
    """The text of a template's file.

    Raises:
        ValueError: it cannot be read, or is no Jinja template.
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


def _way_out() -> str:
    known = "TRL knows none like it" if find_spec("trl") else "install trl, which has some to train with"
    return f"{known}; {_FILE}"


def _of_trl(tokenizer: Any, template: str | None) -> str | None:
    """TRL's template to train with, where TRL is installed and knows the tokenizer's own."""
    if template is not None or not find_spec("trl"):
        return None
    from trl.chat_template_utils import get_training_chat_template

    try:
        found: str | None = get_training_chat_template(tokenizer)
    except ValueError:  # it knows none
        return None
    return found
