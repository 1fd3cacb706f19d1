"""Write the packaged rows: numbers, conversations, and pairs of a right and a wrong answer.

    python benchmarks/packaged_rows.py

They are files of JSON lines in ``oneloop/tasks/packaged``, one per split, and the digits of
scikit-learn beside them. Run it again after a
change; the same code writes the same bytes. The wrong answers are in ``wrong_answers.txt``.

The conversations are on days, months, numbers and opposites. A later question may be short
("And july?"), so that its meaning depends on the previous question.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
FOLDER = HERE.parent / "src" / "oneloop" / "tasks" / "packaged"
WRONG_ANSWERS = HERE / "wrong_answers.txt"

Message = dict[str, str]
Splits = dict[str, list[dict[str, Any]]]

# Numbers in digits and in English words.

NUMBERS = {"train": 8000, "validation": 300, "test": 300}
"""number of rows of each split"""
DRAWN = [(0, 1000, 600), (1000, 10_000, 3000), (10_000, 100_000, 5000)]
"""first number, end and count of each range that is drawn from; the counts sum up to all rows"""
ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(number: int) -> str:
    """Return a number from 0 to 999,999 in English words: ``four thousand twenty-one``."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        words = f"{in_words(thousands)} thousand"
    elif number >= 100:
        hundreds, rest = divmod(number, 100)
        words = f"{ONES[hundreds]} hundred"
    elif number >= 20:
        tens, ones = divmod(number, 10)
        word = TENS[tens - 2]
        return f"{word}-{ONES[ones]}" if ones else word
    else:
        return ONES[number]
    return f"{words} {in_words(rest)}" if rest else words


def numbers() -> Splits:
    """Return rows with a number below 100,000: ``source`` in digits, ``target`` in words.

    No number is in two splits.
    """
    # Short numbers are rare among all, so draw them separately.
    generator = random.Random(17)
    drawn: list[int] = []
    for start, stop, count in DRAWN:
        drawn += generator.sample(range(start, stop), count)
    generator.shuffle(drawn)
    splits = {}
    start = 0
    for name, count in NUMBERS.items():
        rows = []
        for number in drawn[start : start + count]:
            rows.append({"source": str(number), "target": in_words(number)})
        splits[name] = rows
        start += count
    return splits


# Conversations.

LESSONS = {"train": 4000, "validation": 200, "test": 200}
"""number of conversations of each split"""
SYSTEMS = ("You are a patient teacher.", "Answer in one word.")
CYCLES = (
    ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"],
    [
        "january",
        "february",
        "march",
        "april",
        "may",
        "june",
        "july",
        "august",
        "september",
        "october",
        "november",
        "december",
    ],
    ["spring", "summer", "autumn", "winter"],
)
OPPOSITES = [
    "hot",
    "cold",
    "big",
    "small",
    "early",
    "late",
    "open",
    "closed",
    "light",
    "dark",
    "full",
    "empty",
    "old",
    "new",
    "near",
    "far",
    "fast",
    "slow",
    "wet",
    "dry",
]


def neighbour(step: int) -> Callable[[str], str]:
    """Return a function from a word to the word ``step`` later in its cycle."""
    neighbours = {}
    for row in CYCLES:
        for index, name in enumerate(row):
            neighbours[name] = row[(index + step) % len(row)]
    return neighbours.__getitem__


def add(text: str) -> str:
    """Return the sum of "2 plus 3" in words."""
    first, _, second = text.split()
    return ONES[int(first) + int(second)]


def opposite(word: str) -> str:
    """Return the opposite of a word: words with even and odd indices are pairs."""
    return OPPOSITES[OPPOSITES.index(word) ^ 1]


NAMES = [name for row in CYCLES for name in row]
SUMS = [f"{first} plus {second}" for first in range(9) for second in range(9)]


class Rule(NamedTuple):
    """A kind of questions."""

    subjects: Sequence[str]
    questions: tuple[str, str]
    answer: Callable[[str], str]  # of a subject


RULES = [
    Rule(NAMES, ("What comes after {}?", "After {} comes what?"), neighbour(1)),
    Rule(NAMES, ("What comes before {}?", "Before {} comes what?"), neighbour(-1)),
    Rule(SUMS, ("What is {}?", "How much is {}?"), add),
    Rule(
        [*map(str, range(17))],
        ("How is {} written?", "Write {} as a word."),
        lambda text: ONES[int(text)],
    ),
    Rule(OPPOSITES, ("What is the opposite of {}?", "Say the opposite of {}."), opposite),
]
FOLLOW_UPS = ("And {}?", "The same for {}.")


def right_answers() -> Iterator[tuple[str, str]]:
    """Yield each question that is not short, and its answer."""
    for rule in RULES:
        for template in rule.questions:
            for subject in rule.subjects:
                yield template.format(subject), rule.answer(subject)


def full_question(questions: Sequence[str]) -> str:
    """Return the last of several questions as a full one, if it is short.

    Args:
        questions: of one conversation, in order.
    """
    *before, last = questions
    for template in FOLLOW_UPS:
        subject = subject_of(template, last)
        if subject is None:
            continue
        # The question before it may be short, too.
        earlier = full_question(before)
        for rule in RULES:
            for full in rule.questions:
                if subject_of(full, earlier) in rule.subjects:
                    return full.format(subject)
    return last


def subject_of(template: str, question: str) -> str | None:
    """Return the subject of a question that follows a template; None if it does not."""
    start, end = template.split("{}")
    if not (question.startswith(start) and question.endswith(end)):
        return None
    return question[len(start) : len(question) - len(end)]


def conversation(draw: random.Random) -> list[Message]:
    """Return a conversation of one to three questions and answers."""
    messages: list[Message] = []
    if draw.random() < 0.3:
        messages.append({"role": "system", "content": draw.choice(SYSTEMS)})
    asked = False
    rule = draw.choice(RULES)
    for _ in range(draw.randint(1, 3)):
        # Ask a short question with the same rule, or a full one.
        if asked and draw.random() < 0.5:
            questions = FOLLOW_UPS
        else:
            rule = draw.choice(RULES)
            questions = rule.questions
        subject = draw.choice(rule.subjects)
        question = draw.choice(questions).format(subject)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": rule.answer(subject)})
        asked = True
    return messages


def lessons() -> Splits:
    """Return the conversations by split; one generator draws them, so that they differ."""
    generator = random.Random(17)
    splits = {}
    for name, count in LESSONS.items():
        splits[name] = [{"messages": conversation(generator)} for _ in range(count)]
    return splits


def answer_pairs() -> Splits:
    """Return the conversations whose last question has a known wrong answer."""
    wrong = {}
    for line in WRONG_ANSWERS.read_text(encoding="utf-8").splitlines():
        question, _, answer = line.partition("\t")
        wrong[question] = answer
    splits: Splits = {}
    for name, rows in lessons().items():
        splits[name] = []
        for row in rows:
            *prompt, answer = row["messages"]
            asked = [message["content"] for message in prompt if message["role"] == "user"]
            question = full_question(asked)
            if question in wrong:
                rejected = {"role": "assistant", "content": wrong[question]}
                splits[name].append({"prompt": prompt, "chosen": [answer], "rejected": [rejected]})
    return splits


SETS = {"numbers": numbers, "lessons": lessons, "answer_pairs": answer_pairs}


def contents() -> Iterator[tuple[str, bytes]]:
    """Yield the name of each file, and its lines."""
    for name, make in SETS.items():
        for split, rows in make().items():
            lines = "".join(f"{json.dumps(row)}\n" for row in rows)
            yield f"{name}-{split}.jsonl.gz", lines.encode()


def digits() -> dict[str, Any]:
    """Return the images and labels of scikit-learn's digits."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return {"images": data.images.astype("uint8"), "labels": data.target.astype("int64")}


if __name__ == "__main__":
    import numpy as np

    np.savez_compressed(FOLDER / "digits.npz", **digits())
    for file, lines in contents():
        compressed = gzip.compress(lines, mtime=0)
        (FOLDER / file).write_bytes(compressed)
        print(f"{file}: {len(compressed):,} bytes")
