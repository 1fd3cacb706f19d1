"""Numbers in digits and in English words, for translation without a download."""

import random

from oneloop.tasks.rows.cache import key_of

NUMBERS = {"train": 8000, "validation": 300, "test": 300}
"""number of rows of each split"""
_DRAWN = [(0, 1000, 600), (1000, 10_000, 3000), (10_000, 100_000, 5000)]
"""first number, end and count of each range that is drawn from; the counts sum up to all rows"""
_ONES = [
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
_TENS = [
    "twenty",
    "thirty",
    "forty",
    "fifty",
    "sixty",
    "seventy",
    "eighty",
    "ninety",
]


def in_words(number: int) -> str:
    """Return a number from 0 to 999,999 in English words: ``four thousand twenty-one``."""
    if number >= 1000:
        thousands, rest = divmod(number, 1000)
        words = f"{in_words(thousands)} thousand"
    elif number >= 100:
        hundreds, rest = divmod(number, 100)
        words = f"{_ONES[hundreds]} hundred"
    elif number >= 20:
        tens, ones = divmod(number, 10)
        word = _TENS[tens - 2]
        return f"{word}-{_ONES[ones]}" if ones else word
    else:
        return _ONES[number]
    return f"{words} {in_words(rest)}" if rest else words


class NumberWords:
    """Rows with a number below 100,000: ``source`` in digits, ``target`` in words."""

    def __init__(self, part: str) -> None:
        """Generate the rows of ``part``: train, validation or test; no number is in two of them."""
        # Short numbers are rare among all, so draw them separately.
        generator = random.Random(17)
        numbers = list[int]()
        for start, stop, count in _DRAWN:
            numbers += generator.sample(range(start, stop), count)
        generator.shuffle(numbers)
        start = 0
        for name, count in NUMBERS.items():
            if name == part:
                self.numbers = numbers[start : start + count]
            start += count
        self.part = part

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, str]:
        number = self.numbers[index]
        return {"source": str(number), "target": in_words(number)}

    def texts(self) -> list[str]:
        """Return all sources and targets."""
        texts = list[str]()
        for index in range(len(self)):
            texts += self[index].values()
        return texts

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"number {index} of {self.part}"

    def fingerprint(self) -> dict[str, str]:
        """Return a key of the content."""
        return {"numbers": key_of(self.texts())}
