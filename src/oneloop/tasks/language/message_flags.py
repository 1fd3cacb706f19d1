"""Messages that data leave out of training."""

from collections.abc import Mapping, Sequence
from typing import Any

FLAGS = ("weight", "train", "trainable", "training", "loss_mask", "loss")
"""keys with which data say whether a message is trained: 1 or true, 0 or false"""


def left_out(
    given: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    flags: Sequence[str],
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
    found = set[int]()
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
        values = set(trained.values())
        if len(values) > 1:
            raise ValueError(
                f"message {number}: {', '.join(trained)} contradict each other; keep one of them"
            )
        role = messages[before + number]["role"]
        if values == {0} and role == "assistant":
            found.add(before + number)
        if values == {1} and role != "assistant":
            raise ValueError(
                f"message {number} of {role!r} has {next(iter(trained))} true, but only the "
                "assistant's messages are trained; set it to false"
            )
    return found
