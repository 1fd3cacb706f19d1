"""Pairs of a right and a wrong answer: synthetic conversations, and answers of a young model.

The wrong answers are those that the packaged recipe ``sft`` gave after 150 of its steps
(benchmarks/wrong_answers.py wrote them).
"""

from importlib.resources import files
from typing import Any

from oneloop.tasks.language.synthetic_chats import SyntheticChats, whole_question
from oneloop.tasks.rows.cache import key_of


class PairedChats:
    """Synthetic conversations whose last question has a known wrong answer.

    Args:
        part: train, validation or test.
    """

    def __init__(self, part: str) -> None:
        wrong = _wrong_answers()
        self.part = part
        self.pairs = list[dict[str, Any]]()
        for messages in SyntheticChats(part).conversations:
            *prompt, answer = messages
            asked = [message["content"] for message in prompt if message["role"] == "user"]
            question = whole_question(asked)
            if question in wrong:
                rejected = {"role": "assistant", "content": wrong[question]}
                self.pairs.append({"prompt": prompt, "chosen": [answer], "rejected": [rejected]})

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.pairs[index]

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"lesson {index} of {self.part}"

    def fingerprint(self) -> dict[str, Any]:
        """Return a key of the content."""
        return {"pairs of lessons": key_of(self.pairs)}


def _wrong_answers() -> dict[str, str]:
    """Return a wrong answer for each question that has one."""
    file = files("oneloop.tasks.language").joinpath("wrong_answers.txt")
    answers = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        question, _, answer = line.partition("\t")
        answers[question] = answer
    return answers
