"""Conversations that are always there: lessons on made-up words, a few rules that hold for every word.

They are made on the spot, the same everywhere. Words of validation and test do not occur in training.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from typing import Any

from oneloop.data.rows.cache import key_of

Message = dict[str, str]

_SYSTEMS = ("You are a careful teacher.", "Answer with the word alone.")
_RULES: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "capitals": (("Write {} in capitals.", "{} in capitals, please."), str.upper),
    "first": (("Which letter does {} begin with?", "The first letter of {}?"), lambda word: word[0]),
    "last": (("Which letter does {} end with?", "The last letter of {}?"), lambda word: word[-1]),
    "twice": (("Say {} twice.", "{}, two times."), lambda word: f"{word} {word}"),
    "spell": (("Spell {}.", "How do you spell {}?"), lambda word: "-".join(word)),
}
_AGAIN = ("And {}?", "The same for {}.")
LESSONS = {"train": 4000, "validation": 200, "test": 200}


class Lessons:
    """Rows of one to three questions and answers; a later question may ask for the same rule again.

    Args:
        part: train, validation or test.
    """

    def __init__(self, part: str) -> None:
        draw, seen = random.Random(17), set[str]()
        made = {name: [_lesson(draw, seen) for _ in range(count)] for name, count in LESSONS.items()}
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


def _lesson(draw: random.Random, seen: set[str]) -> list[Message]:
    messages = [{"role": "system", "content": draw.choice(_SYSTEMS)}] if draw.random() < 0.3 else []
    rule = ""
    for _ in range(draw.randint(1, 3)):
        word = _new_word(draw, seen)
        again = bool(rule) and draw.random() < 0.5
        rule = rule if again else draw.choice([*_RULES])
        asked, answered = _RULES[rule]
        messages.append({"role": "user", "content": draw.choice(_AGAIN if again else asked).format(word)})
        messages.append({"role": "assistant", "content": answered(word)})
    return messages


def _new_word(draw: random.Random, seen: set[str]) -> str:
    while (word := "".join(draw.choices(string.ascii_lowercase, k=draw.randint(3, 6)))) in seen:
        pass
    seen.add(word)
    return word
