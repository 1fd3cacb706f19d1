"""Texts of a conversation that its chat template does not write: they are rejected, or counted.

A text is written if the template writes another text in its place. So it does not matter how the
template writes it: stripped, in any form of JSON, as a call in Python, or as XML.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from operator import getitem
from reprlib import repr as brief
from typing import Any, NamedTuple

from oneloop.tasks.rows.cached_arrays import remark

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_UNREAD = ("role", "id", "tool_call_id")  # they only link messages
Render = Callable[[Sequence[Any], Any], str]
"""renders messages and tools, or raises ValueError"""


class _Part(NamedTuple):
    """A value that a template should write.

    Args:
        path: its keys in {"messages": messages, "tools": tools}, from the outermost.
        value: a text, or an object.
        subject: what it is, for the log.
        needed: whether an answer depends on it.
    """

    path: tuple[Any, ...]
    value: Any
    subject: str
    needed: bool = True


def check_written(
    text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, render: Render
) -> None:
    """Raise ValueError if a template leaves out tools, tool calls or results; count other texts.

    Args:
        text: the rendered conversation.
        messages: the conversation, with tool calls in the form that the template needs.
        tools: JSON schemas for the template.
        render: renders messages and tools.
    """
    # Most conversations have only contents, which are found in their order.
    given = {"messages": messages, "tools": tools or ()}
    parts = [*_parts(given, text)]
    plain = not any(part.needed or part.path[-1] != "content" for part in parts)
    if plain and _in_order(text, parts):
        return

    # Replace all texts by marks, which the template should write.
    marks = {f"Qx{number}xQ": part for number, part in enumerate(parts)}
    marked = _rendered(given, marks, render) or ""

    # Replace each of the others alone: the template may write a mark in another form.
    counted = set[str]()
    for mark, part in marks.items():
        if mark in marked or part.subject in counted:
            continue
        if _rendered(given, {mark: part}, render) != text:
            continue
        example = brief(part.value)
        if part.needed:
            raise ValueError(
                f"the chat template does not write {part.subject} (number {part.path[1]}: "
                f"{example}), so an answer would be trained without it; use a template that writes "
                "it, or remove the row (to ignore all tools: task.tools '')"
            )
        counted.add(part.subject)
        remark(f"have {part.subject} that the chat template does not write", example)


def _parts(given: Mapping[str, Any], text: str) -> Iterator[_Part]:
    """Yield the values that a template should write."""
    for number, tool in enumerate(given["tools"]):
        yield from _named(("tools", number), tool, "the tools")
    for number, message in enumerate(given["messages"]):
        role = message["role"]
        for key, value in message.items():
            path = ("messages", number, key)
            subject = f"{key} of {role} messages"
            if key == "tool_calls":
                for index, call in enumerate(value):
                    yield from _named((*path, index), call, subject)
            if not isinstance(value, str) or not value.strip() or key in _UNREAD:
                continue

            # Templates drop earlier thoughts by design, and a tool's name stands in its call.
            thoughts = key in _THOUGHTS
            if thoughts and message is not given["messages"][-1]:
                continue
            repeated = thoughts or (role, key) == ("tool", "name")
            if not (repeated and value.strip() in text):
                yield _Part(path, value, subject, (role, key) == ("tool", "content"))


def _named(path: tuple[Any, ...], value: Any, subject: str) -> Iterator[_Part]:
    """Yield name and arguments of a tool or a call; the whole, if it has no name."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        path = (*path, "function")
        value = value["function"]
    if not isinstance(value, Mapping) or not value.get("name"):
        yield _Part(path, value, subject)
        return
    for key in ("name", "arguments"):
        if value.get(key):
            yield _Part((*path, key), value[key], subject)


def _in_order(text: str, parts: Sequence[_Part]) -> bool:
    """Return whether a text has these texts one after the other."""
    for part in parts:
        _, found, text = text.partition(part.value.strip())
        if not found:
            return False
    return True


def _rendered(given: Any, marks: Mapping[str, _Part], render: Render) -> str | None:
    """Return the text with marks in place of values; None if the template rejects them."""
    changed = deepcopy(given)
    for mark, part in marks.items():
        *outer, key = part.path
        of_keys = dict.fromkeys(part.value, mark) if isinstance(part.value, Mapping) else mark
        reduce(getitem, outer, changed)[key] = of_keys
    try:
        return render(changed["messages"], changed["tools"])
    except ValueError:
        return None
