"""Conversations that are always there: lessons on days, months, numbers and opposites, made on the spot.

A later question may be short ("And july?"): what is asked is to be known from the one before.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

from oneloop.data.rows.cache import key_of

Message = dict[str, str]


def _words(text: str) -> list[str]:
    return text.split()


_SYSTEMS = ("You are a patient teacher.", "Answer in one word.")
_ROUNDS = (
    _words("monday tuesday wednesday thursday friday saturday sunday"),
    _words("january february march april may june july august september october november december"),
    _words("spring summer autumn winter"),
)
_NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
)
_OPPOSITES = _words(
    "hot cold big small early late open closed light dark full empty old new near far fast slow wet dry"
)


def _beside(step: int) -> Callable[[str], str]:
    beside = {row[at]: row[(at + step) % len(row)] for row in _ROUNDS for at in range(len(row))}
    return beside.__getitem__


def _sum(text: str) -> str:
    one, _, other = text.split()
    return _NUMBERS[int(one) + int(other)]


def _opposite(word: str) -> str:
    return _OPPOSITES[_OPPOSITES.index(word) ^ 1]


_NAMES = [name for row in _ROUNDS for name in row]
_SUMS = [f"{one} plus {other}" for one in range(9) for other in range(9)]
_RULES: list[tuple[Sequence[str], Sequence[str], Callable[[str], str]]] = [
    (_NAMES, ("What comes after {}?", "After {} comes what?"), _beside(1)),
    (_NAMES, ("What comes before {}?", "Before {} comes what?"), _beside(-1)),
    (_SUMS, ("What is {}?", "How much is {}?"), _sum),
    ([*map(str, range(17))], ("How is {} written?", "Write {} as a word."), lambda text: _NUMBERS[int(text)]),
    (_OPPOSITES, ("What is the opposite of {}?", "Say the opposite of {}."), _opposite),
]
_AGAIN = ("And {}?", "The same for {}.")
LESSONS = {"train": 4000, "validation": 200, "test": 200}


class SyntheticChats:
    """Rows of one to three questions and answers; ``part`` is train, validation or test."""

    def __init__(self, part: str) -> None:
        draw = random.Random(17)
        made = {name: [_lesson(draw) for _ in range(count)] for name, count in LESSONS.items()}
        self.part, self.conversations = part, made[part]

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, list[Message]]:
        return {"messages": self.conversations[index]}

    def where(self, index: int) -> str:
        """Which lesson it is, for a person."""
        return f"lesson {index} of {self.part}"

    def fingerprint(self) -> dict[str, Any]:
        """What the lessons are."""
        return {"lessons": key_of(self.conversations)}


def _lesson(draw: random.Random) -> list[Message]:
    messages = [{"role": "system", "content": draw.choice(_SYSTEMS)}] if draw.random() < 0.3 else []
    asked, rule = False, draw.choice(_RULES)
    for _ in range(draw.randint(1, 3)):
        again = asked and draw.random() < 0.5
        rule = rule if again else draw.choice(_RULES)
        things, questions, answered = rule
        thing = draw.choice(things)
        messages.append({"role": "user", "content": draw.choice(_AGAIN if again else questions).format(thing)})
        messages.append({"role": "assistant", "content": answered(thing)})
        asked = True
    return messages
