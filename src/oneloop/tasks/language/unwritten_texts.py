"""Texts of a conversation that its chat template does not write: they are rejected, or counted.

A text is written if the template writes another text in its place. So it does not matter how the
template writes it: stripped, in any form of JSON, as a call in Python, or as XML. Only
arguments that are printed as Python prints a dict are rejected: the template needs them as text.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from reprlib import repr as brief
from typing import Any, NamedTuple

from oneloop.tasks.rows.cached_arrays import remark

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_UNREAD = ("role", "id", "tool_call_id")  # they only link messages
_TOOLS = "the tools"
Render = Callable[[Sequence[Any], Any], str]
"""renders messages and tools, or raises ValueError"""


class _Part(NamedTuple):
    """A value that a template should write.

    Args:
        holder: the message, tool, call or list that has it.
        key: its key there.
        value: a text, or an object.
        number: of the message or tool.
        subject: what it is, for the log.
        needed: whether an answer depends on it.
    """

    holder: Any
    key: Any
    value: Any
    number: int
    subject: str
    needed: bool = True


def check_written(
    text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, render: Render
) -> None:
    """Raise ValueError if a template leaves out tools, tool calls or results; count other texts.

    Also raise it if arguments of a call are written as Python writes a dict, which is not JSON.

    Args:
        text: the rendered conversation.
        messages: the conversation.
        tools: JSON schemas for the template.
        render: renders messages and tools.
    """
    # Replace all texts by marks, which the template should write.
    messages, tools = deepcopy((messages, tools))
    marks = {f"Qx{number}xQ": part for number, part in enumerate(_parts(messages, tools, text))}
    render_copy = partial(render, messages, tools)
    marked = _rendered(marks, render_copy) or ""

    # Replace each of the others alone: the template may write a mark in another form.
    counted = set[str]()
    for mark, part in marks.items():
        if part.key == "arguments" and part.value != {} and repr(part.value) in text:
            raise ValueError(
                f"the chat template writes the arguments of {part.subject} (number {part.number}) "
                f"as Python and not as JSON ({brief(part.value)}); write them with the filter "
                "tojson"
            )
        if mark in marked or part.subject in counted:
            continue
        if _rendered({mark: part}, render_copy) != text:
            continue
        example = brief(part.value)
        if part.needed:
            remedy = "remove the row"
            if part.subject == _TOOLS:
                remedy = "ignore all tools: task.tools ''"
            raise ValueError(
                f"the chat template does not write {part.subject} (number {part.number}: "
                f"{example}), so an answer would be trained without this value; use a template "
                f"that writes it, or {remedy}"
            )
        counted.add(part.subject)
        remark(f"have {part.subject} that the chat template does not write", example)


def _rendered(marks: Mapping[str, _Part], render: Callable[[], str]) -> str | None:
    """Return the text with marks in place of values; None if the template rejects them."""
    for mark, part in marks.items():
        marked = dict.fromkeys(part.value, mark) if isinstance(part.value, Mapping) else mark
        part.holder[part.key] = marked
    try:
        return render()
    except ValueError:
        return None
    finally:
        for part in marks.values():
            part.holder[part.key] = part.value


def _parts(messages: Sequence[Any], tools: Sequence[Any] | None, text: str) -> Iterator[_Part]:
    """Yield the values that a template should write."""
    for number in range(len(tools or ())):
        yield from _named(tools, number, number, _TOOLS)
    for number, message in enumerate(messages):
        for key, value in message.items():
            subject = f"{key} of {message['role']} messages"
            if key == "tool_calls":
                for index in range(len(value)):
                    yield from _named(value, index, number, subject)
            if not isinstance(value, str) or not value.strip() or key in _UNREAD:
                continue

            # Templates drop earlier thoughts by design, and a tool's name stands in its call.
            thoughts = key in _THOUGHTS
            if thoughts and message is not messages[-1]:
                continue
            repeated = thoughts or subject == "name of tool messages"
            if not (repeated and value.strip() in text):
                needed = subject == "content of tool messages"
                yield _Part(message, key, value, number, subject, needed)


def _named(holder: Any, key: Any, number: int, subject: str) -> Iterator[_Part]:
    """Yield name and arguments of a tool or a call; the whole, if it has no name."""
    named = holder[key]
    if isinstance(named, Mapping):
        named = named.get("function") or named
    if not isinstance(named, Mapping) or not named.get("name"):
        yield _Part(holder, key, holder[key], number, subject)
        return
    for part in ("name", "arguments"):
        if named.get(part):
            yield _Part(named, part, named[part], number, subject)
