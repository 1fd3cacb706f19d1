"""Messages that data leave out of training."""

from collections.abc import Mapping, Sequence
from typing import Any

FLAGS = ("weight", "train", "trainable", "training", "loss_mask", "loss")
"""keys with which data say whether a message is trained: 1 or true, 0 or false"""


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
