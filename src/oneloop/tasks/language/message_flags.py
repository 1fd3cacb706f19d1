"""Messages that data leave out of training, and what else older versions did not read."""

from collections.abc import Mapping, Sequence
from typing import Any

from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.synthetic_chats import SyntheticChats
from oneloop.tasks.language.tool_calls import CallForm

FLAGS = ("weight", "train", "trainable", "training", "loss_mask", "loss")
"""keys with which data say whether a message is trained: 1 or true, 0 or false"""
_SINCE = "(older versions of oneloop did not, so begin a new run)"


def left_out(
    messages: Sequence[Mapping[str, Any]], roles: Sequence[str], flags: Sequence[str]
) -> set[int]:
    """Return the indices of the assistant's messages that the data leave out of training.

    Args:
        messages: the messages as the user wrote them.
        roles: their roles.
        flags: keys of a message that say whether it is trained.

    Raises:
        ValueError: a flag is neither 0, 1, false nor true, or says that a message of another role
            is trained.
    """
    found = set[int]()
    for number, (message, role) in enumerate(zip(messages, roles, strict=True)):
        trained: dict[str, bool] = {}
        for flag in flags:
            value = message.get(flag)
            if value is None:
                continue
            if not isinstance(value, int | float) or value not in (0, 1):
                raise ValueError(
                    f"message {number}: {flag} is {value!r}; expected 0, 1, false or true; if it "
                    f"has another meaning, leave {flag!r} out of task.flags"
                )
            trained[flag] = bool(value)
        if not trained:
            continue

        # All flags of a message must agree, and only answers can be trained.
        if len(set(trained.values())) > 1:
            raise ValueError(
                f"message {number}: {', '.join(trained)} contradict each other; keep one of them"
            )
        if role == "assistant" and not any(trained.values()):
            found.add(number)
        elif role != "assistant" and any(trained.values()):
            raise ValueError(
                f"message {number} of {role!r} has {next(iter(trained))} true, but only the "
                "assistant's messages are trained; set it to false"
            )
    return found


def newer(
    rows: Any, columns: Mapping[str, str], chat: Chat | None, flags: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the flags that messages have, and what older versions read otherwise in these rows.

    A resume compares the latter.

    Args:
        rows: rows of a split.
        columns: column name of each of the task's keys ("": no column).
        chat: the chat template (None: all rows are texts).
        flags: keys of a message that may say whether it is trained.
    """
    found: dict[str, str] = {}
    if columns["system"]:
        found["system"] = f"the column {columns['system']!r} is read {_SINCE}"
    column = columns["messages"] or columns["completion"]
    if chat is None or not column or isinstance(rows, SyntheticChats):
        return [], found
    present = _keys_of_messages(rows, column, flags)
    if present:
        found["flags"] = f"messages are left out by {', '.join(present)} {_SINCE}"
    if chat.call_form != CallForm() and _keys_of_messages(rows, column, ["tool_calls"]):
        found["tool calls"] = f"the template gets them in the form that it writes {_SINCE}"
    return present, found


def _keys_of_messages(rows: Any, column: str, keys: Sequence[str]) -> list[str]:
    """Return which of these keys some message of a column has: lists of objects, or JSON text."""
    from pyarrow import compute, types

    found = set[str]()
    for array in rows.values(column):
        if types.is_string(array.type) or types.is_large_string(array.type):
            # Within the strings of JSON, quotes have backslashes.
            for key in set(keys) - found:
                has = compute.match_substring_regex(array, rf'[{{,]\s*"{key}"\s*:')
                if compute.any(has).as_py():
                    found.add(key)
        elif types.is_nested(array.type) and types.is_struct(array.type.value_type):
            messages = array.flatten()
            for key in keys:
                index = messages.type.get_field_index(key)
                if index >= 0 and messages.field(index).null_count < len(messages):
                    found.add(key)
    return [key for key in keys if key in found]
