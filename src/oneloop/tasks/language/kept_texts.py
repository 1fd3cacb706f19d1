"""Texts that their tokens do not give back: kept beside the tokens, for metrics of generated texts.

A tokenizer may drop or replace characters.
"""

from collections.abc import Iterable
from itertools import dropwhile, takewhile
from reprlib import repr as brief
from typing import Any

from oneloop.tasks.rows.cached_arrays import remark


def keep_text(tokens: Iterable[int], text: str, tokenizer: Any) -> None:
    """Keep the text of the first answer of a row, and count the row, if its tokens do not give it.

    Blanks at both ends, and special tokens in the text, do not count.

    Args:
        tokens: of the row; complements are no part of an answer.
        text: of the answer.
        tokenizer: of transformers.
    """
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            text = text.replace(token.content, "")
    text = text.strip()
    written = tokenizer.decode(first_answer(tokens), skip_special_tokens=True)
    if written.strip() != text:
        example = f"{brief(text)} becomes {brief(written)}"
        remark("have a target that the tokenizer does not give back", example, text=text)


def first_answer(tokens: Iterable[int]) -> list[int]:
    """Return the first tokens that are not negative."""
    begun = dropwhile((0).__gt__, tokens)
    return [*takewhile((0).__le__, begun)]
