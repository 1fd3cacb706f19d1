"""Log lines about texts: those that are cut, and tokens that stand for unknown text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.kept_texts import BYTE
from oneloop.tasks.rows.cached_arrays import Ragged

_WARNED = 0.1  # share of texts that are cut, from which the line is a warning
_AROUND = 8  # tokens that an example shows before and after an unknown one


def cut_notes(
    count: int,
    total: int,
    what: str,
    *,
    limit: str,
    action: str,
    lost: int = 0,
    loses: str = "of {:,} the answer loses its end",
) -> list[str]:
    """Return a line about texts that are longer than a limit; none if there are none.

    Args:
        count: number of these texts.
        total: number of all texts.
        what: plural of what is counted.
        limit: the limit, with its unit.
        action: what is done with them.
        lost: number of what is lost.
        loses: says so, with a place for this number.
    """
    if not count:
        return []
    line = f"{count:,} of {total:,} {what} are longer than {limit} and are {action}"
    if lost:
        line += f"; {loses.format(lost)}"
    # Text that is split is not lost.
    if count >= _WARNED * total and not action.startswith("split"):
        line = f"warning: {line}"
    return [line]


def limit_of(length: int, *, unit: str = "targets") -> str:
    """Return a limit as text; targets begin at the second token."""
    limit = f"{length:,} {unit}"
    return f"{length + 1:,} tokens ({limit})" if unit == "targets" else limit


def unknown_token(tokenizer: Any) -> int | None:
    """Return the token that stands for unknown text.

    None: there is none, or it also begins or ends texts, so that it cannot be counted.

    Args:
        tokenizer: of transformers, or another one without such a token.
    """
    token = getattr(tokenizer, "unk_token", None)
    if token is None:
        return None
    ends = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.cls_token, tokenizer.sep_token)
    return None if token in ends else int(tokenizer.unk_token_id)


def unknown_line(tokens: int, count: int, total: int, what: str, tokenizer: Any, text: str) -> str:
    """Return the line about unknown tokens.

    Args:
        tokens: number of unknown tokens.
        count: number of texts that have any.
        total: number of all texts.
        what: plural of what is counted.
        tokenizer: of transformers.
        text: an example.
    """
    return (
        f"{tokens:,} tokens in {count:,} of {total:,} {what} are unknown to the tokenizer "
        f"({tokenizer.unk_token!r}), such as in {text!r}"
    )


def unknown_notes(
    texts: Ragged,
    tokenizer: Any,
    what: str,
    *,
    signs: Sequence[int] = (0, -1),
    scale: int = 1,
    head: int = 0,
) -> list[str]:
    """Return a line about unknown tokens in tokenized texts; none if there are none.

    Args:
        texts: tokens, or their complements.
        tokenizer: of transformers.
        what: plural of what is counted.
        signs: 0 counts tokens, and -1 complements.
        scale: a number is a token times this, plus a smaller number.
        head: numbers before the tokens of each text.
    """
    unknown = unknown_token(tokenizer)
    if unknown is None:
        return []
    codes = [(scale * unknown + part) ^ sign for sign in signs for part in range(scale)]
    places = np.flatnonzero(np.isin(texts.values, codes))

    # Find the texts that they are in.
    ends = np.asarray(texts.ends)
    starts = np.concatenate([[0], ends])[:-1] + head
    text = np.searchsorted(ends, places, side="right")
    is_token = places >= starts[text]
    places = places[is_token]
    text = text[is_token]
    if not len(places):
        return []

    # Show the first one.
    begin = max(starts[text[0]], places[0] - _AROUND)
    shown = texts.values[begin : min(places[0] + _AROUND, ends[text[0]])]
    example = tokenizer.decode(token_ids(shown[shown < BYTE]) // scale)
    count = len(np.unique(text))
    return [unknown_line(len(places), count, len(ends), what, tokenizer, example)]


def measure_notes(
    made: Ragged, rows: Any, reader: Any, texts: Sequence[Sequence[str]], what: str
) -> list[str]:
    """Return lines about texts of rows that are cut, and about unknown tokens.

    Args:
        made: of each row, three numbers for each of its texts: see ``measured`` of the reader.
        rows: the rows.
        reader: has measured the texts.
        texts: columns of the texts of a row; those of a list are encoded together.
        what: plural of what is counted.
    """
    cut, unknown, words_cut = made.values.reshape(-1, 3).T
    lines = cut_notes(
        int(cut.sum()),
        len(cut),
        what,
        limit=limit_of(reader.length, unit=reader.unit),
        action="truncated",
        lost=int(words_cut.sum()),
        loses="{:,} words are left out",
    )
    if not unknown.any():
        return lines

    # Show the tokens around the first unknown one.
    first = int(unknown.argmax())
    measured = np.delete(np.arange(len(rows)), [index for index, _ in made.skipped])
    row = rows[int(measured[first // len(texts)])]
    tokens = reader.whole(*[row[name] for name in texts[first % len(texts)]])
    place = tokens.index(unknown_token(reader.tokenizer))
    shown = tokens[max(0, place - _AROUND) : place + _AROUND]
    line = unknown_line(
        int(unknown.sum()),
        int((unknown > 0).sum()),
        len(unknown),
        what,
        reader.tokenizer,
        reader.tokenizer.decode(shown),
    )
    return [*lines, line]
