"""Texts of a conversation that its chat template does not write: they are rejected, or counted.

A text is written if the template writes another text in its place. So it does not matter how the
template writes it: stripped, in any form of JSON, as a call in Python, or as XML.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from oneloop.tasks.rows.cached_arrays import remark

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_UNREAD = ("role", "id", "tool_call_id")  # texts that only link messages
# keys of a value, from the outermost, in {"messages": messages, "tools": tools}
_Path = tuple[str | int, ...]


def check_written(
    text: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    render: Callable[[Sequence[Any], Any], str],
) -> None:
    """Raise ValueError if a template leaves out tools, tool calls or results; count other texts.

    Args:
        text: the rendered conversation.
        messages: the conversation, with tool calls in the form that the template needs.
        tools: JSON schemas for the template.
        render: renders messages and tools, or raises ValueError.
    """
    # Most conversations have only contents, which are found in their order.
    given = {"messages": messages, "tools": tools or ()}
    paths = [*_paths(given, text)]
    contents = [_value(given, path) for path in paths if path[-1] == "content"]
    results = any(message["role"] == "tool" for message in messages)
    if len(contents) == len(paths) and not results and _in_order(text, contents):
        return

    # Replace all texts by marks, which the template should write.
    marks = [f"Qx{number}xQ" for number in range(len(paths))]
    marked = _rendered(given, paths, marks, render) or ""
    missing = [path for path, mark in zip(paths, marks, strict=True) if mark not in marked]

    # Replace only the others: the template may write a mark in another form.
    for several in (missing, *([path] for path in missing)):
        if several and _rendered(given, several, marks, render) == text:
            for path in several:
                _report(given, path)
            if several is missing:
                return


def _report(given: Mapping[str, Any], path: _Path) -> None:
    """Raise ValueError about a text that is not written, or count it."""
    if path[0] == "tools":
        raise ValueError(
            "the chat template does not write the tools, so the answers would be trained without "
            "them; use a template that writes them, or ignore the column: task.tools ''"
        )
    number, key = path[1:3]
    role = given["messages"][number]["role"]
    if key == "tool_calls":
        raise ValueError(
            "the chat template does not write the assistant's answer with the tool calls of "
            f"message {number}; use a template that writes them, or remove the row"
        )
    value = _value(given, path)
    if role == "tool" and key == "content":
        raise ValueError(
            f"the chat template does not write the tool's result of message {number} "
            f"({_brief(value)}), so the next answer would be trained without it; use a template "
            "that writes it, or remove the row"
        )
    remark(f"{key} of {role} messages", _brief(value))


def _paths(given: Mapping[str, Any], text: str) -> Iterator[_Path]:
    """Yield the paths of the values that a template should write."""
    for number, tool in enumerate(given["tools"]):
        yield from _named(("tools", number), tool)
    messages = given["messages"]
    for number, message in enumerate(messages):
        for key, value in message.items():
            path = ("messages", number, key)
            if key == "tool_calls":
                for index, call in enumerate(value):
                    yield from _named((*path, index), call)
            if not isinstance(value, str) or not value.strip() or key in _UNREAD:
                continue
            # Templates drop earlier thoughts by design, and a tool's name stands in its call.
            thoughts = key in _THOUGHTS
            repeated = thoughts or (message["role"] == "tool" and key == "name")
            earlier = thoughts and number < len(messages) - 1
            if not earlier and not (repeated and value.strip() in text):
                yield path


def _named(path: _Path, value: Any) -> Iterator[_Path]:
    """Yield the paths of name and arguments of a tool or a call; else the path of the whole."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        path = (*path, "function")
        value = value["function"]
    if not isinstance(value, Mapping) or not value.get("name"):
        yield path
        return
    yield (*path, "name")
    if value.get("arguments"):
        yield (*path, "arguments")


def _in_order(text: str, contents: Sequence[str]) -> bool:
    """Return whether a text has these contents one after the other."""
    position = 0
    for content in contents:
        found = text.find(content.strip(), position)
        if found < 0:
            return False
        position = found + len(content.strip())
    return True


def _rendered(
    given: Any,
    paths: Sequence[_Path],
    marks: Sequence[str],
    render: Callable[[Sequence[Any], Any], str],
) -> str | None:
    """Return the text with marks at some paths; None if the template rejects them."""
    for path, mark in zip(paths, marks, strict=False):
        given = _with(given, path, mark)
    try:
        return render(given["messages"], given["tools"])
    except ValueError:
        return None


def _value(given: Any, path: _Path) -> Any:
    """Return the value at a path."""
    for key in path:
        given = given[key]
    return given


def _with(given: Any, path: _Path, mark: str) -> Any:
    """Return a copy in which a mark is in place of a text, and of each value of an object."""
    if path:
        key: Any = path[0]
        copy: Any = {**given} if isinstance(given, Mapping) else [*given]
        copy[key] = _with(given[key], path[1:], mark)
        return copy
    return dict.fromkeys(given, mark) if isinstance(given, Mapping) else mark


def _brief(value: str) -> str:
    return repr(value if len(value) < 40 else f"{value[:39]}…")
