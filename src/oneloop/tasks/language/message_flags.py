"""Messages that data leave out of training, and what else older versions did not read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.messages_as_json import read
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


@dataclass(frozen=True)
class Keys:
    """Keys of the messages in some rows.

    Args:
        flags: keys that say whether a message is trained.
        read_since: what older versions read otherwise in these rows; a resume compares it.
        calls: whether some message has tool calls.
    """

    flags: Sequence[str] = ()
    read_since: Mapping[str, str] = field(default_factory=dict)
    calls: bool = False


def keys_of(rows: Any, columns: Mapping[str, str], chat: Chat | None, flags: Sequence[str]) -> Keys:
    """Return which keys the messages of these rows have.

    Args:
        rows: rows of a split.
        columns: column name of each of the task's keys ("": no column).
        chat: the chat template (None: all rows are texts).
        flags: keys of a message that may say whether it is trained.
    """
    since: dict[str, str] = {}
    if columns["system"]:
        since["system"] = f"the column {columns['system']!r} is read {_SINCE}"
    column = columns.get("messages") or columns.get("completion")
    if chat is None or not column or isinstance(rows, SyntheticChats):
        return Keys((), since)

    values = _values_of_messages(rows, column, [*flags, "tool_calls"])
    calls = bool(values.pop("tool_calls"))
    present = [flag for flag in flags if values[flag]]
    out = [flag for flag in present if values[flag] - {1}]
    if out:
        since["flags"] = f"messages are left out by {', '.join(out)} {_SINCE}"
    if chat.call_form != CallForm() and calls:
        since["tool calls"] = f"the template gets them in the form that it writes {_SINCE}"
    return Keys(present, since, calls)


def _values_of_messages(rows: Any, column: str, keys: Sequence[str]) -> dict[str, set[Any]]:
    """Return the values of each of these keys in the messages of a column, without nulls.

    Numbers and truth values are kept; others count as their text. Messages are lists of objects,
    or JSON text.
    """
    from pyarrow import compute, types

    # Keys of JSON, which may be written with escapes.
    pattern = rf'"({"|".join(keys)})"\s*:|\\u00'
    found: dict[str, set[Any]] = {key: set() for key in keys}
    for array in rows.values(column):
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        messages: Iterable[Any] = ()
        if types.is_string(array.type) or types.is_large_string(array.type):
            some = array.filter(compute.match_substring_regex(array, pattern))
            messages = chain.from_iterable(read(text) or () for text in some.to_pylist())
        elif types.is_nested(array.type) and _are_objects(array.type):
            flat = array.flatten()
            kept = [key for key in keys if flat.type.get_field_index(key) >= 0]
            messages = _objects(flat, kept)
        for message in messages:
            for key in keys:
                value = message.get(key)
                if value is not None:
                    found[key].add(value if isinstance(value, int | float) else repr(value))
    return found


def _are_objects(kind: Any) -> bool:
    """Return whether an Arrow type is that of lists of objects."""
    from pyarrow import types

    return not types.is_struct(kind) and types.is_struct(kind.value_type)


def _objects(array: Any, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield an object with each distinct value of these fields of an array of structs."""
    for key in keys:
        for value in array.field(key).drop_null().to_pylist():
            yield {key: value}
