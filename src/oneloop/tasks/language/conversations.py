"""Rows as training tokens: conversations, or prompts and completions, in common formats.

Messages are ``{"role": …, "content": …}`` as in transformers, or ``{"from": …, "value": …}`` as in
ShareGPT. A list of messages may also be a JSON string, and one message stands for a list of one.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.completions import completed, tokenized, whole_text
from oneloop.tasks.language.messages_as_json import brief, is_message, is_missing, read
from oneloop.tasks.rows.objects import Written
from oneloop.tasks.rows.rows import Row

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
FLAGS = ("weight", "train", "trainable", "training", "loss_mask", "loss")
"""keys with which data say whether a message is trained: 1 or true, 0 or false"""
# An answer needs a value of one of these keys.
ANSWERS = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")


def encoded(
    row: Row,
    columns: Mapping[str, str],
    tokenizer: Any,
    chat: Chat | None,
    flags: Sequence[str] = (),
    *,
    labelled: bool = True,
) -> NDArray[np.int32]:
    """Return the tokens of a row; untrained tokens are complements.

    Args:
        row: values by column.
        columns: column name of each of the task's keys ("": no column).
        tokenizer: a tokenizer of transformers.
        chat: the chat template (None: all rows are texts).
        flags: keys of a message that say whether it is trained.
        labelled: whether each row has answers. If not, only a last answer is a target; one unused
            token follows a prompt without an answer.

    Raises:
        ValueError: the row is malformed.
    """
    # A whole text.
    if columns.get("text"):
        return whole_text(tokenizer, row[columns["text"]])

    # A conversation, or a prompt that may have a completion.
    system = entry(row, columns, "system") or ""
    if not isinstance(system, str):
        raise ValueError(
            f"{columns['system']!r} holds {brief(system)}; expected text of system prompts; name "
            "another column with task.system, or ignore this one: task.system ''"
        )
    tools = _tools(entry(row, columns, "tools"))
    prompt = row[columns["messages"] or columns["prompt"]]
    completion = entry(row, columns, "completion")
    alone = columns["messages"] != "" or (not labelled and is_missing(completion))
    if not alone and is_text(prompt) != is_text(completion):
        raise ValueError(
            f"the prompt is {brief(prompt)}, and the completion {brief(completion)}; both must "
            "be texts, or both messages"
        )

    # Texts.
    if columns["prompt"] and is_text(prompt):
        _reject_unread(columns, system=system, tools=tools)
        if alone:
            return _unanswered(tokenized(tokenizer, prompt)[0])
        if not completion:
            raise ValueError("the completion is empty; fill it, or remove the row")
        return completed(tokenizer, prompt, completion)

    # Messages; those of a prompt have no flags.
    messages = _with_system(conversation(prompt), columns, system)
    flagged = prompt if columns["messages"] else completion
    given = 0
    if not alone:
        answer = conversation(completion)
        if messages[-1]["role"] == answer[0]["role"] == "assistant":
            raise ValueError(
                "the prompt ends with a message of the assistant "
                f"({brief(messages[-1]['content'])}), and an answer follows; join a begun answer "
                "and its end into one message of the answer"
            )
        given = len(messages)
        messages += answer
    untrained = _untrained(read(flagged), messages, flags)
    if chat is None:
        raise ValueError(
            "this row is a conversation, but others are texts; put them in separate data sets"
        )

    # Without answers in all rows, the last message may be one.
    if alone and not labelled:
        given = len(messages) - 1
        if not given or messages[-1]["role"] != "assistant":
            return _unanswered(chat.prompt(messages, tools))
    return chat.encode(messages, tools, given=given, untrained=untrained)


def _untrained(
    given: Sequence[Any], messages: Sequence[Mapping[str, Any]], flags: Sequence[str]
) -> set[int]:
    """Return the indices of the assistant's messages that the data leave out of training.

    Args:
        given: messages as the user wrote them: the last ones of the conversation.
        messages: the conversation.
        flags: keys of a message that say whether it is trained.

    Raises:
        ValueError: a flag is neither 0, 1, false nor true, or says that a message of another role
            is trained.
    """
    untrained = set[int]()
    before = len(messages) - len(given)
    for number, message in enumerate(given):
        trained = {flag: message[flag] for flag in flags if message.get(flag) is not None}
        for flag, value in trained.items():
            if not isinstance(value, int | float) or value not in (0, 1):
                raise ValueError(
                    f"message {number}: {flag} is {value!r}; expected 0, 1, false or true; if it "
                    f"has another meaning, leave {flag!r} out of task.flags"
                )

        # All flags of a message must agree, and only answers can be trained.
        values = {*trained.values()}
        role = messages[before + number]["role"]
        if len(values) > 1:
            raise ValueError(
                f"message {number}: {', '.join(trained)} contradict each other; keep one of them"
            )
        if values == {1} and role != "assistant":
            raise ValueError(
                f"message {number} of {role!r} has {next(iter(trained))} true, but only the "
                "assistant's messages are trained; set it to false"
            )
        if values == {0} and role == "assistant":
            untrained.add(before + number)
    return untrained


def entry(row: Row, columns: Mapping[str, str], key: str) -> Any:
    """Return the value of a row for a key of the task; None if it has no column."""
    return row[columns[key]] if columns.get(key) else None


def _unanswered(tokens: Sequence[int]) -> NDArray[np.int32]:
    """Return a prompt as complements, and one token: the last one of a sample is not an input."""
    if not tokens:
        raise ValueError("the prompt is empty; fill it, or remove the row")
    return ~np.array([*tokens, 0], dtype=np.int32)


def _with_system(
    messages: list[dict[str, Any]], columns: Mapping[str, str], system: str
) -> list[dict[str, Any]]:
    """Return the messages after a system prompt of its own column, if it has one.

    Raise ValueError if the messages begin with another system message.
    """
    if not system:
        return messages
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise ValueError(
            f"the column {columns['system']!r} and the first message are different system prompts; "
            "keep one, or ignore the column: task.system ''"
        )
    return messages


def _reject_unread(columns: Mapping[str, str], **values: Any) -> None:
    """Raise ValueError if a row whose prompt is a text has a system prompt or tools."""
    for key, value in values.items():
        if value:
            name = "a system prompt" if key == "system" else key
            raise ValueError(
                f"the column {columns[key]!r} has {name}, and the prompt is a text; write it as "
                f"messages, or ignore the column: task.{key} ''"
            )


def column_choices(
    columns: Mapping[str, str], kinds: Sequence[Sequence[str]]
) -> list[dict[str, str]]:
    """Return the columns that a source may have, the most complete choice first.

    Args:
        columns: column name of each of the task's keys.
        kinds: keys of each kind of rows, which may have tools and a system prompt, too.
    """
    choices = []
    for kind in kinds:
        for optional in (("tools", "system"), ("tools",), ("system",), ()):
            keys = (*kind, *optional)
            choice = {key: name if key in keys else "" for key, name in columns.items()}
            if choice not in choices:
                choices.append(choice)
    return choices


def holds_texts(rows: Any, column: str) -> bool:
    """Whether the first text or messages of a column is a text; if it has neither, other values."""
    others = False
    for index in range(len(rows)):
        value = rows[index][column]
        if value and (isinstance(value, str) or has_messages(value)):
            return is_text(value)
        others = others or value is not None
    return others


def is_text(value: Any) -> bool:
    """Whether a prompt or completion is a text, and not messages as JSON."""
    return isinstance(value, str) and not has_messages(value)


def has_messages(value: Any) -> bool:
    """Whether a value is messages: a list of them, its JSON, or one message."""
    return any(map(is_message, read(value)))


def conversation(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a conversation, from a list, its JSON, or one message.

    Raise ValueError with the index of a malformed message.
    """
    messages = read(value)
    if not messages:
        raise ValueError(
            f"expected a list of messages, got {brief(value)}; a message has role and content"
        )
    return [_message(message, number) for number, message in enumerate(messages)]


def _message(given: Any, number: int) -> dict[str, Any]:
    """Return a message with role and content. Raise ValueError if it is malformed."""
    if not isinstance(given, Mapping):
        raise ValueError(f"message {number} must have role and content, got {brief(given)}")
    message: dict[str, Any] = _without_nulls({**given})

    # Convert ShareGPT's keys and roles.
    if "from" in message and "role" not in message:
        source = message
        message = {"role": _SHAREGPT_ROLES.get(str(source["from"]), source["from"])}
        if "value" in source:
            message["content"] = source["value"]

    # Check the role.
    role = message.get("role")
    if role is None:
        raise ValueError(f"message {number} has no role; it has {', '.join(message) or 'nothing'}")
    if role not in ROLES:
        raise ValueError(
            f"message {number} has role {role!r}; expected one of {', '.join(ROLES)}; rename it"
        )
    if role == "assistant":
        message = {"content": "", **message}

    # Check and convert the content; an answer must say something.
    if "content" not in message:
        raise ValueError(f"message {number} has no content; it has {', '.join(given)}")
    message["content"] = _text(message["content"], number)
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError(
            f"message {number}: its tool_calls are {brief(calls)}; a list of objects is needed"
        )
    if calls:
        message["tool_calls"] = [*map(_with_object, calls)]
    if role == "assistant" and not any(message.get(key) for key in ANSWERS):
        raise ValueError(
            f"message {number}: the assistant's answer is empty; fill it, or remove the row"
        )
    return message


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool call whose arguments are an object, if they are the JSON text of one."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        parsed = json.loads(arguments)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return call
    if not isinstance(parsed, dict):
        return call
    return {**call, "function": {**function, "arguments": parsed}}  # type: ignore[dict-item]


def _text(content: Any, number: int) -> str:
    """Return the content of a message as text. Raise ValueError if it is not only text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"message {number}: its content is {brief(content)}; text is needed")
    texts = []
    for part in content:
        is_text_part = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text_part or not isinstance(part.get("text"), str):
            raise ValueError(
                f"message {number} holds more than text ({brief(part)}); this task supports "
                "only text"
            )
        texts.append(part["text"])
    return "".join(texts)


def _tools(value: Any) -> list[Any] | None:
    """Return the tools of a row, from a list or its JSON. Raise ValueError if it is neither."""
    bare = "".join(value.split()) if isinstance(value, str) else _without_nulls(value)
    if bare in (None, "", "null", "[]", "{}", [], {}):
        return None
    tools = read(value)
    if not tools or not all(isinstance(tool, Mapping | str) for tool in tools):
        raise ValueError(f"the tools are {brief(value)}; a list of JSON schemas is needed")
    return [json.loads(tool) if isinstance(tool, str) else _without_nulls(tool) for tool in tools]


def _without_nulls(value: Any) -> Any:
    """Remove null values, recursively: a table gives every row the keys of all rows."""
    if isinstance(value, Written):
        return value
    if isinstance(value, Mapping):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(inner) for inner in value]
    return value
