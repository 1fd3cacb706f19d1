"""The packaged conversations, for tests that train models on them."""

from __future__ import annotations

from oneloop.tasks.packaged_rows import PackagedRows


def lessons(split: str) -> list[list[dict[str, str]]]:
    """Return the messages of each packaged conversation of a split."""
    return [row["messages"] for row in PackagedRows("lessons", split)]


def lesson_texts(split: str) -> list[str]:
    """Return the contents of all their messages."""
    return [message["content"] for chat in lessons(split) for message in chat]
