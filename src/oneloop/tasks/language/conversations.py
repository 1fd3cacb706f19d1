"""What is told in rows: conversations, or prompts and how they go on, read as people write them.

Messages are ``{"role": …, "content": …}`` as transformers takes them, or ``{"from": …, "value": …}`` as ShareGPT has
them; lists may also stand as JSON in a text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.rows.rows import Row
from oneloop.tasks.language.chat import Chat, completed

ROLES = ("system", "developer", "user", "assistant", "tool")
_FROM = {"human": "user", "gpt": "assistant", "observation": "tool", **{role: role for role in ROLES}}
_SAID = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")
"""what an assistant's message may hold"""


def encoded(row: Row, columns: Mapping[str, str], tokenizer: Any, chat: Chat | None) -> NDArray[np.int32]:
    """Tokens of a row; those that are not trained as their complements.

    Args:
        row: with its columns' values.
        columns: the task's keys, and the names that they have in the row ("": it has none).
        tokenizer: of prompts and completions that are texts.
        chat: of conversations.

    Raises:
        ValueError: what is wrong with it.
    """
    tools = _tools(row[columns["tools"]]) if columns["tools"] else None
    if columns["messages"]:
        return _chat(chat).encode(conversation(row[columns["messages"]]), tools)
    prompt, completion = row[columns["prompt"]], row[columns["completion"]]
    if isinstance(prompt, str) and isinstance(completion, str) and _read(prompt) is None:
        if not completion:
            raise ValueError("the completion is empty; fill it, or leave the row out")
        return completed(tokenizer, prompt, completion)
    before, after = conversation(prompt), conversation(completion)
    return _chat(chat).encode([*before, *after], tools, given=len(before))


def _chat(chat: Chat | None) -> Chat:
    if chat is None:
        raise ValueError("it holds a conversation, and other rows hold texts; give them in sets of their own")
    return chat


def conversation(value: Any) -> list[dict[str, Any]]:
    """The messages of a conversation.

    Raises:
        ValueError: it is none: what was found, and where in it.
    """
    value = _read(value) if isinstance(value, str) else value
    if not isinstance(value, Sequence) or isinstance(value, str) or not len(value):
        raise ValueError(f"a list of messages is needed, and there is {_briefly(value)}")
    return [_message(one, number) for number, one in enumerate(value, start=1)]


def _message(given: Any, number: int) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"message {number} is {_briefly(given)}, and needs a role and a content")
    message = _without_nothing(given)
    if "from" in message and "role" not in message:
        message = {"role": _FROM.get(message["from"], message["from"]), "content": message.get("value", "")}
    role = message.get("role")
    if role is None:
        raise ValueError(f"message {number} has no role; it has {', '.join(message) or 'nothing'}")
    if role not in ROLES:
        raise ValueError(f"message {number} is by {role!r}, which is none of {', '.join(ROLES)}; rename it")
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise ValueError(f"message {number} holds more than text ({_briefly(part)}); this task reads text alone")
    if role == "assistant" and not any(message.get(key) for key in _SAID):
        raise ValueError(f"message {number}: the assistant says nothing; fill it, or leave the row out")
    for call in message.get("tool_calls") or ():
        if isinstance(function := call.get("function"), dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _object(function["arguments"])
    return {"content": "", **message} if role == "assistant" else message


def _tools(value: Any) -> list[Any] | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools = _read(value) if isinstance(value, str) else value
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping | str) for tool in tools):
        raise ValueError(f"the tools are {_briefly(value)}; a list of JSON schemas is needed")
    return [_without_nothing(json.loads(tool) if isinstance(tool, str) else tool) for tool in tools]


def _read(text: str) -> Any:
    """A list that stands as JSON in a text; None where none does."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _object(text: str) -> Any:
    """Arguments as a JSON object, where they are one: templates write them themselves."""
    try:
        made = json.loads(text)
    except ValueError:
        return text
    return made if isinstance(made, dict) else text


def _without_nothing(value: Any) -> Any:
    """Without keys that hold nothing: tables give all rows the keys of any."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_nothing(inner) for inner in value]
    return value


def _briefly(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) < 60 else f"{text[:57]}…"
