"""Prompts and how they go on, as tokens; and which letters of a text a token is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def completed(tokenizer: Any, prompt: str, completion: str) -> NDArray[np.int32]:
    """Tokens of a text and how it goes on; the first as their complements. The last one is the tokenizer's end token.

    A token of both, where the tokenizer makes one, is trained.

    Raises:
        ValueError: the tokenizer has no end token.
    """
    if (end := tokenizer.eos_token_id) is None:
        raise ValueError(
            "the tokenizer has no end token, so the model would not learn to stop; set eos_token in the"
            " tokenizer_config.json beside the model"
        )
    tokens, places = _without_ends(tokenizer, prompt + completion)
    found = np.array([*tokens, end], dtype=np.int32)
    return np.where(np.arange(len(found)) < first_behind(places, len(prompt)), ~found, found)


def prompted(tokenizer: Any, prompt: str) -> list[int]:
    """Tokens of a text that is to go on."""
    return _without_ends(tokenizer, prompt)[0]


def _without_ends(tokenizer: Any, text: str) -> tuple[list[int], NDArray[np.int64]]:
    """Tokens and places of a text, without what the tokenizer adds behind it, and with one token of beginning at
    most."""
    tokens, places = placed(tokenizer, text)
    while len(tokens) > 1 and (not places[len(tokens) - 1].any() or tokens[-1] == tokenizer.eos_token_id):
        tokens = tokens[:-1]
    first, begin = 0, tokenizer.bos_token_id
    while begin is not None and tokens[first : first + 2] == [begin, begin]:  # added to a text that has one
        first += 1
    return tokens[first:], places[first : len(tokens)]


def placed(tokenizer: Any, text: str, **how: bool) -> tuple[list[int], NDArray[np.int64]]:
    """Tokens of a text, and from which to which letter each is, (tokens, 2)."""
    made = tokenizer(text, return_offsets_mapping=True, verbose=False, **how)
    return list(made["input_ids"]), np.array(made["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def first_behind(places: NDArray[np.int64], letter: int) -> int:
    """The first token that ends behind a letter's beginning: of tokens on both sides it is one."""
    return int((places[:, 1] <= letter).sum())


def upto(places: NDArray[np.int64], letter: int) -> int:
    """The first token that does not begin before a letter."""
    at = first_behind(places, letter)
    return at + int(at < len(places) and places[at, 0] < letter)
