"""Synthetic chat data: conversations on days, months, numbers and opposites, without a download.

A later question may be short ("And july?"), so that its meaning depends on the previous question.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from oneloop.tasks.rows.cache import key_of

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
    """Return a function from a word to the word ``step`` later in its cycle."""
    neighbours = {}
    for row in _CYCLES:
        for index, name in enumerate(row):
            neighbours[name] = row[(index + step) % len(row)]
    return neighbours.__getitem__


def _sum(text: str) -> str:
    one, _, other = text.split()
    return _NUMBERS[int(one) + int(other)]


def _opposite(word: str) -> str:
    # Words with even and odd indices are pairs.
    return _OPPOSITES[_OPPOSITES.index(word) ^ 1]


_NAMES = [name for row in _CYCLES for name in row]
_SUMS = [f"{one} plus {other}" for one in range(9) for other in range(9)]


class _Rule(NamedTuple):
    subjects: Sequence[str]
    questions: tuple[str, str]
    answer: Callable[[str], str]  # of a subject


_RULES = [
    _Rule(_NAMES, ("What comes after {}?", "After {} comes what?"), _neighbour(1)),
    _Rule(_NAMES, ("What comes before {}?", "Before {} comes what?"), _neighbour(-1)),
    _Rule(_SUMS, ("What is {}?", "How much is {}?"), _sum),
    _Rule(
        [*map(str, range(17))],
        ("How is {} written?", "Write {} as a word."),
        lambda text: _NUMBERS[int(text)],
    ),
    _Rule(_OPPOSITES, ("What is the opposite of {}?", "Say the opposite of {}."), _opposite),
]
_FOLLOW_UPS = ("And {}?", "The same for {}.")
LESSONS = {"train": 4000, "validation": 200, "test": 200}
"""number of conversations of each split"""


def whole_question(questions: Sequence[str]) -> str:
    """Return the last of several questions as a whole one, if it is short.

    Args:
        questions: of one conversation, in order.
    """
    *before, last = questions
    for template in _FOLLOW_UPS:
        subject = _subject(template, last)
        if subject is None:
            continue
        # The question before it may be short, too.
        earlier = whole_question(before)
        for rule in _RULES:
            for whole in rule.questions:
                if _subject(whole, earlier) in rule.subjects:
                    return whole.format(subject)
    return last


def _subject(template: str, question: str) -> str | None:
    """Return the subject of a question that follows a template; None if it does not."""
    start, end = template.split("{}")
    if not (question.startswith(start) and question.endswith(end)):
        return None
    return question[len(start) : len(question) - len(end)]


class SyntheticChats:
    """Conversations of one to three questions and answers."""

    def __init__(self, part: str) -> None:
        """Generate the conversations of ``part``: train, validation or test."""
        # Generate all splits with one generator, so that they differ.
        generator = random.Random(17)
        chats = {}
        for name, count in LESSONS.items():
            chats[name] = [_conversation(generator) for _ in range(count)]
        self.part = part
        self.conversations = chats[part]

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, list[Message]]:
        return {"messages": self.conversations[index]}

    def texts(self) -> list[str]:
        """Return the contents of all messages."""
        texts = []
        for messages in self.conversations:
            texts += [message["content"] for message in messages]
        return texts

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"lesson {index} of {self.part}"

    def fingerprint(self) -> dict[str, Any]:
        """Return a key of the content."""
        return {"lessons": key_of(self.conversations)}


def _conversation(draw: random.Random) -> list[Message]:
    messages = list[Message]()
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": draw.choice(_SYSTEMS)})
    asked = False
    rule = draw.choice(_RULES)
    for _ in range(draw.randint(1, 3)):
        # Ask a short question with the same rule, or a whole one.
        if asked and draw.random() < 0.5:
            questions = _FOLLOW_UPS
        else:
            rule = draw.choice(_RULES)
            questions = rule.questions
        subject = draw.choice(rule.subjects)
        question = draw.choice(questions).format(subject)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": rule.answer(subject)})
        asked = True
    return messages
