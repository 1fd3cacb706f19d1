"""Prompts and completions as tokens, and the character offsets of tokens."""

from collections.abc import Collection, Sequence
from os.path import commonprefix
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.kept_texts import keep_text
from oneloop.tasks.language.messages_as_json import brief
from oneloop.tasks.rows.cached_arrays import Ragged
from oneloop.tasks.text_notes import remark_unknown

_INSPECTED = 100  # number of texts


def completed(tokenizer: Any, prompt: str, completion: str) -> NDArray[np.int32]:
    """Return the tokens of a prompt (as complements) and its completion, with the end token.

    A token that spans both is trained. Raise ValueError if the tokenizer has no end token, or no
    token ends within the prompt.
    """
    end = end_of(tokenizer)
    tokens, offsets = tokenized(tokenizer, prompt + completion)
    array = np.array([*tokens, end], dtype=np.int32)
    border = first_ending_after(offsets, len(prompt))
    marked = _marked(array, border)
    # The text of a token that spans both begins in the prompt.
    begin = min([len(prompt), *offsets[border : border + 1, 0].tolist()])
    keep_text(marked.tolist(), (prompt + completion)[begin:], tokenizer)
    return marked


def with_one_border(
    tokenizer: Any, prompt: str, sides: Sequence[NDArray[np.int32]]
) -> list[NDArray[np.int32]]:
    """Return the tokens of several answers to a prompt, which all begin at the same token.

    They begin at the first token that differs between the prompt alone and the prompt with any of
    the answers, as in TRL (``common_prefix_length``). Each answer keeps at least one token.

    Args:
        tokenizer: a tokenizer of transformers.
        prompt: the prompt, not empty.
        sides: of each answer, the tokens that :func:`completed` returns.

    Raises:
        ValueError: an answer begins at the first token, which nothing predicts.
    """
    ids = [token_ids(side) for side in sides]
    texts = [side[:-1].tolist() for side in ids]
    texts.append(tokenized(tokenizer, prompt, ends=True)[0])
    border = len(commonprefix(texts))  # noqa: RUF071 of lists
    return [_marked(side, border) for side in ids]


def _marked(tokens: NDArray[np.int32], border: int) -> NDArray[np.int32]:
    """Return tokens as complements before a border. Raise ValueError if there are none."""
    if not border:
        raise ValueError(
            "the prompt is empty, or its first token continues into the answer, so the answer's "
            "first token could not be trained; make the prompt longer"
        )
    return np.where(np.arange(len(tokens)) < border, ~tokens, tokens)


def whole_text(tokenizer: Any, text: str) -> NDArray[np.int32]:
    """Return the tokens of a text with the end token; all but the first are targets.

    Raise ValueError if the text is empty or no text, or the tokenizer has no end token.
    """
    end = end_of(tokenizer)
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {brief(text)}; name another column, or remove it")
    tokens = tokenized(tokenizer, text)[0]
    if not tokens:
        raise ValueError("the text is empty; fill it, or remove the row")
    return np.array([*tokens, end], dtype=np.int32)


def end_of(tokenizer: Any) -> int:
    """Return the tokenizer's end token. Raise ValueError if it has none."""
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no end token, so the model would not learn to stop; set eos_token "
            "in tokenizer_config.json"
        )
    return int(tokenizer.eos_token_id)


def tokenized(
    tokenizer: Any, text: str, *, ends: bool = False
) -> tuple[list[int], NDArray[np.int64]]:
    """Return tokens and offsets of a text, with at most one BOS token.

    ``ends``: keep tokens that the tokenizer appends, and end tokens of the text.
    """
    tokens, offsets = with_offsets(tokenizer, text)
    first = 0
    begin = tokenizer.bos_token_id
    while tokens[first : first + 2] == [begin, begin]:
        first += 1

    # Tokens that the tokenizer appends have no characters, or are the end token.
    last = len(tokens)
    while not ends and last - first > 1:
        if offsets[last - 1].any() and tokens[last - 1] != tokenizer.eos_token_id:
            break
        last -= 1
    return tokens[first:last], offsets[first:last]


def with_offsets(tokenizer: Any, text: str, **options: bool) -> tuple[list[int], NDArray[np.int64]]:
    """Return the tokens of a text and their character offsets, shape (tokens, 2)."""
    encoding = tokenizer(text, return_offsets_mapping=True, verbose=False, **options)
    offsets = np.array(encoding["offset_mapping"], dtype=np.int64)
    remark_unknown(encoding["input_ids"], tokenizer)
    return list(encoding["input_ids"]), offsets.reshape(-1, 2)


def first_ending_after(offsets: NDArray[np.int64], position: int) -> int:
    """Return the first token that ends after a character position; it may start before it."""
    return int((offsets[:, 1] <= position).sum())


def first_starting_at(offsets: NDArray[np.int64], position: int) -> int:
    """Return the first token that does not start before a character position."""
    first = first_ending_after(offsets, position)
    return first + int(first < len(offsets) and offsets[first, 0] < position)


def ends_in(texts: Ragged, special: Collection[int], tokenizer: Any) -> set[int]:
    """Return the tokens that end answers: the tokenizer's end token, and some special tokens.

    Args:
        texts: tokens of each text; complements are not trained.
        special: the special tokens. Those count that end a trained turn of the first 100 texts; a
            line break may follow.
        tokenizer: the tokenizer of the texts.
    """
    ends = {tokenizer.eos_token_id} - {None}
    stop = texts.ends[min(_INSPECTED, len(texts.ends)) - 1]
    # Read backwards: the first token of a trained turn that is not blank is its end.
    inside = False
    for token in reversed(texts.values[:stop].tolist()):
        if token in special and not inside:
            ends.add(token)
        if token < 0:
            inside = False
        elif not inside:
            inside = token in special or not tokenizer.decode([token]).isspace()
    return ends


def end_token_notes(ends: Collection[int], tokenizer: Any) -> list[str]:
    """Return a log line if answers end with tokens other than the tokenizer's end token."""
    others = [end for end in ends if end != tokenizer.eos_token_id]
    if not others:
        return []
    line = (
        f"answers end with {tokenizer.decode(others)!r}, and the tokenizer's end token is "
        f"{tokenizer.eos_token!r}: generation_config.json in final/ contains both, so that "
        "transformers stops at either"
    )
    return [line]
