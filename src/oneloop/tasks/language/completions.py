"""Prompts and how they go on, as tokens; and which letters of a text a token is."""

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.data.rows.cached_arrays import Ragged

_LOOKED_AT = 100  # texts


def completed(tokenizer: Any, prompt: str, completion: str) -> NDArray[np.int32]:
    """Return the tokens of a prompt (as complements) and of its completion, with the end token. A token of both is
    trained. Raises ValueError if the tokenizer has no end token."""
    end = end_of(tokenizer)
    tokens, places = _without_ends(tokenizer, prompt + completion)
    found, border = np.array([*tokens, end], dtype=np.int32), first_behind(places, len(prompt))
    if not border:
        raise ValueError("the prompt is empty, so the completion's first token could not be trained; fill it")
    return np.where(np.arange(len(found)) < border, ~found, found)


def end_of(tokenizer: Any) -> int:
    """Return the tokenizer's end token. Raises ValueError if it has none."""
    if tokenizer.eos_token_id is None:
        advice = "set eos_token in tokenizer_config.json"
        raise ValueError(f"the tokenizer has no end token, so the model would not learn to stop; {advice}")
    return int(tokenizer.eos_token_id)


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


def ends_in(texts: Ragged, special: Collection[int], tokenizer: Any) -> set[int]:
    """Return the tokens that end the trained turns of the first texts (one of ``special``, before a line break), and
    the tokenizer's end token. Complements are not trained."""
    ends, inside = {tokenizer.eos_token_id} - {None}, False
    for token in reversed(texts.values[: texts.ends[min(_LOOKED_AT, len(texts.ends)) - 1]].tolist()):
        if token in special and not inside:
            ends.add(token)
        inside = token >= 0 and (inside or token in special or not tokenizer.decode([token]).isspace())
    return ends


def other_ends(ends: Collection[int], tokenizer: Any) -> list[str]:
    """What to say where answers end with another token than the tokenizer's end token."""
    others = [end for end in ends if end != tokenizer.eos_token_id]
    found = f"answers end with {tokenizer.decode(others)!r}, and the tokenizer's end token is {tokenizer.eos_token!r}"
    return (
        [f"{found}: generation_config.json in final/ contains both, so that transformers stops at either"]
        if others
        else []
    )
