"""What is told in rows: conversations, or prompts and how they go on, read as people write them.

Messages are ``{"role": …, "content": …}`` as transformers takes them, or ``{"from": …, "value": …}`` as ShareGPT has
them; lists may also stand as JSON in a text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.rows.rows import Row
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.completions import completed, prompted

ROLES = ("system", "developer", "user", "assistant", "tool")
_FROM = {"human": "user", "gpt": "assistant", "observation": "tool", **{role: role for role in ROLES}}
_SAID = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")  # what an assistant's message may hold


def encoded(row: Row, columns: Mapping[str, str], tokenizer: Any, chat: Chat | None) -> NDArray[np.int32]:
    """Return the tokens of a row, untrained ones as complements. ``columns`` are the names in the row by key ("":
    none). Raises ValueError."""
    tools = _tools(row[columns["tools"]]) if columns["tools"] else None
    if columns["messages"]:
        return _chat(chat).encode(conversation(row[columns["messages"]]), tools)
    prompt, completion = row[columns["prompt"]], row[columns["completion"]]
    if is_text(prompt) != is_text(completion):
        kinds = f"the prompt is {_briefly(prompt)}, and the completion {_briefly(completion)}"
        raise ValueError(f"{kinds}; both must be texts, or both messages")
    if is_text(prompt):
        if not completion:
            raise ValueError("the completion is empty; fill it, or remove the row")
        return completed(tokenizer, prompt, completion)
    template, before, after = _chat(chat), conversation(prompt), conversation(completion)
    return template.encode([*before, *after], tools, given=len(before))


def asked(row: Row, columns: Mapping[str, str], tokenizer: Any, chat: Chat | None) -> NDArray[np.int32]:
    """Return the tokens of a question as complements, and one unused token; if the row contains the answer, as in
    :func:`encoded`, only that is a target. Raises ValueError."""
    tools = _tools(row[columns["tools"]]) if columns["tools"] else None
    given = row[columns["messages"] or columns["prompt"]]
    if columns["completion"] and row[columns["completion"]]:
        return encoded(row, columns, tokenizer, chat)
    if columns["prompt"] and is_text(given):
        tokens = prompted(tokenizer, given)
    else:
        messages = conversation(given)
        if messages[-1]["role"] == "assistant" and len(messages) > 1:
            return _chat(chat).encode(messages, tools, given=len(messages) - 1)
        tokens = _chat(chat).prompt(messages, tools)
    if not tokens:
        raise ValueError("the prompt is empty; fill it, or remove the row")
    return ~np.array([*tokens, 0], dtype=np.int32)


def _chat(chat: Chat | None) -> Chat:
    if chat is None:
        raise ValueError("it holds a conversation, and other rows hold texts; give them in sets of their own")
    return chat


def is_text(value: Any) -> bool:
    """Whether a prompt or completion is a text, and no messages as JSON."""
    return isinstance(value, str) and not any("role" in one or "from" in one for one in read(value) or ())


def conversation(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation. Raises ValueError with the number of the bad message (counted from 0, as
    rows are)."""
    found = read(value) if isinstance(value, str) else value
    if not isinstance(found, Sequence) or not len(found):
        raise ValueError(f"a list of messages is needed, and there is {_briefly(value)}")
    return [_message(one, number, exact=isinstance(value, str)) for number, one in enumerate(found)]


def _message(given: Any, number: int, *, exact: bool) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"message {number} is {_briefly(given)}, and needs a role and a content")
    message: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    message = message if exact else _without_nothing(message)  # in JSON text, a null is the user's
    if "from" in message and "role" not in message:
        known = {"content": message["value"]} if "value" in message else {}
        message = {"role": _FROM.get(message["from"], message["from"]), **known}
    role = message.get("role")
    if role is None:
        raise ValueError(f"message {number} has no role; it has {', '.join(message) or 'nothing'}")
    if role not in ROLES:
        raise ValueError(f"message {number} has role {role!r}; expected one of {', '.join(ROLES)}; rename it")
    if role == "assistant":
        message = {"content": "", **message}
        if not any(message.get(key) for key in _SAID):
            raise ValueError(f"message {number}: the assistant's answer is empty; fill it, or remove the row")
    if "content" not in message:
        raise ValueError(f"message {number} has no content; it has {', '.join(given)}")
    message["content"] = _text(message["content"], number)
    if "tool_calls" in message:
        message["tool_calls"] = _calls(message["tool_calls"], number)
    return message


def _text(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(content, list):
            raise ValueError(f"message {number}: its content is {_briefly(content)}; text is needed")
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"message {number} holds more than text ({_briefly(part)}); this task supports only text")
    return "".join(part["text"] for part in content)


def _calls(calls: Any, number: int) -> list[Any]:
    """Calls of tools, their arguments as objects: templates write them themselves."""
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(f"message {number}: its tool_calls are {_briefly(calls)}; a list of objects is needed")
    for call in calls:
        if isinstance(function := call.get("function"), dict) and isinstance(function.get("arguments"), str):
            function["arguments"] = _object(function["arguments"])
    return calls


def _tools(value: Any) -> list[Any] | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools = read(value) if isinstance(value, str) else value
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping | str) for tool in tools):
        raise ValueError(f"the tools are {_briefly(value)}; a list of JSON schemas is needed")
    if isinstance(value, str):
        return list(tools)  # in JSON text, a null is the user's
    return [json.loads(tool) if isinstance(tool, str) else _without_nothing(tool) for tool in tools]


def read(text: str) -> list[Any] | None:
    """A list of objects that stands as JSON in a text; None where none does."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if found and all(isinstance(one, dict) for one in found) else None


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
