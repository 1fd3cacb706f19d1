"""Packaged rows: small data sets in ``packaged/``, so that recipes train without a download.

``benchmarks/packaged_rows.py`` has written them.
"""

import gzip
import json
from pathlib import Path
from typing import Any

from oneloop.tasks.rows.cache import key_of

FOLDER = Path(__file__).with_name("packaged")
SPLITS = ("train", "validation", "test")


class PackagedRows(list[dict[str, Any]]):
    """The rows of a split, in memory.

    Args:
        name: numbers (``source`` in digits, ``target`` in words), lessons (conversations), or
            answer_pairs (conversations with a right and a wrong last answer).
        split: train, validation or test.
    """

    def __init__(self, name: str, split: str) -> None:
        file = FOLDER / f"{name}-{split}.jsonl.gz"
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            super().__init__(map(json.loads, lines))
        self.name = f"{name}, {split}"

    def where(self, index: int) -> str:
        """Return the name of a row for messages."""
        return f"row {index} of {self.name}"

    def fingerprint(self) -> dict[str, str]:
        """Return a key of the content."""
        return {"packaged rows": key_of(self)}
