"""Synthetic chat data: generated conversations on days, months, numbers and opposites; no download
is needed.

A later question may be short ("And july?"), so that its meaning depends on the previous question.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from oneloop.data.rows.cache import key_of

Message = dict[str, str]


def _words(text: str) -> list[str]:
    return text.split()


_SYSTEMS = ("You are a patient teacher.", "Answer in one word.")
_CYCLES = (
    _words("monday tuesday wednesday thursday friday saturday sunday"),
    _words("january february march april may june july august september october november december"),
    _words("spring summer autumn winter"),
)
_NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen"
)
_OPPOSITES = _words(
    "hot cold big small early late open closed light dark full empty old new near far fast "
    "slow wet dry"
)


def _neighbour(step: int) -> Callable[[str], str]:
    neighbours = {
        row[index]: row[(index + step) % len(row)] for row in _CYCLES for index in range(len(row))
    }
    return neighbours.__getitem__


def _sum(text: str) -> str:
    one, _, other = text.split()
    return _NUMBERS[int(one) + int(other)]


def _opposite(word: str) -> str:
    return _OPPOSITES[_OPPOSITES.index(word) ^ 1]


_NAMES = [name for row in _CYCLES for name in row]
_SUMS = [f"{one} plus {other}" for one in range(9) for other in range(9)]
_RULES: list[tuple[Sequence[str], Sequence[str], Callable[[str], str]]] = [
    (_NAMES, ("What comes after {}?", "After {} comes what?"), _neighbour(1)),
    (_NAMES, ("What comes before {}?", "Before {} comes what?"), _neighbour(-1)),
    (_SUMS, ("What is {}?", "How much is {}?"), _sum),
    (
        [*map(str, range(17))],
        ("How is {} written?", "Write {} as a word."),
        lambda text: _NUMBERS[int(text)],
    ),
    (_OPPOSITES, ("What is the opposite of {}?", "Say the opposite of {}."), _opposite),
]
_FOLLOW_UPS = ("And {}?", "The same for {}.")
LESSONS = {"train": 4000, "validation": 200, "test": 200}


class SyntheticChats:
    """Conversations of one to three questions and answers; ``part`` is train, validation or
    test."""

    def __init__(self, part: str) -> None:
        generator = random.Random(17)
        chats = {
            name: [_conversation(generator) for _ in range(count)]
            for name, count in LESSONS.items()
        }
        self.part, self.conversations = part, chats[part]

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, list[Message]]:
        return {"messages": self.conversations[index]}

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"lesson {index} of {self.part}"

    def fingerprint(self) -> dict[str, Any]:
        """Return a key of the content."""
        return {"lessons": key_of(self.conversations)}


def _conversation(draw: random.Random) -> list[Message]:
    messages = [{"role": "system", "content": draw.choice(_SYSTEMS)}] if draw.random() < 0.3 else []
    asked, rule = False, draw.choice(_RULES)
    for _ in range(draw.randint(1, 3)):
        again = asked and draw.random() < 0.5
        rule = rule if again else draw.choice(_RULES)
        subjects, questions, answer = rule
        subject = draw.choice(subjects)
        messages.append(
            {
                "role": "user",
                "content": draw.choice(_FOLLOW_UPS if again else questions).format(subject),
            }
        )
        messages.append({"role": "assistant", "content": answer(subject)})
        asked = True
    return messages
