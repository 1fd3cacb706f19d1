"""Rows as pairs of answers to one prompt: as tokens, in TRL's column layouts.

A pair is one array: the number of tokens of the chosen side, the bits of the margin (float32), the
tokens of the chosen side, and those of the rejected side. Each side is a prompt, as complements
(:mod:`oneloop.tasks.language.sequences`), and an answer. In texts, both answers begin at the same
token (:func:`oneloop.tasks.language.completions.with_one_border`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.completions import with_one_border
from oneloop.tasks.language.conversations import (
    ANSWERS,
    conversation,
    encoded,
    entry,
    is_text,
)
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.messages_as_json import brief, is_missing
from oneloop.tasks.rows.cached_arrays import remark
from oneloop.tasks.rows.remote_checks import is_finite
from oneloop.tasks.rows.rows import Row

OverlongPair = Literal["cut", "drop"]
SIDES = ("chosen", "rejected")
_EQUAL = "both answers are equal, so nothing can be learned from the pair; remove the row"


def encoded_pair(
    row: Row,
    columns: Mapping[str, str],
    tokenizer: Any,
    chat: Chat | None,
    *,
    length: int,
    overlong: OverlongPair = "cut",
) -> NDArray[np.int32]:
    """Return a row as a pair; empty if it is dropped.

    Args:
        row: values by column.
        columns: column name of each of the task's keys ("": no column).
        tokenizer: a tokenizer of transformers.
        chat: the chat template (None: all rows are texts).
        length: maximum number of input tokens of a side.
        overlong: cut the end of a longer answer, or drop the pair.

    Raises:
        ValueError: the row is malformed, or a side has no answer within ``length``.
    """
    prompt, answers = _parts(row, columns)
    sides = []
    for side in SIDES:
        # One answer is encoded as the completion of a prompt.
        completed = {**row, _PROMPT: prompt, _ANSWER: answers[side]}
        try:
            tokens = encoded(completed, {**columns, **_COMPLETION}, tokenizer, chat)
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from error
        sides.append(tokens)
    if is_text(prompt):
        sides = with_one_border(tokenizer, prompt, sides)

    # Drop a pair that is too long, or cut the ends of its answers.
    longest = max(map(len, sides))
    if longest > length + 1:
        limit = f"task.length ({length + 1:,} tokens)"
        remark(f"are longer than {limit}; task.overlong is {overlong}", f"{longest:,} tokens")
        if overlong == "drop":
            return np.zeros(0, np.int32)
    cut = [tokens[: length + 1] for tokens in sides]
    _check_cut(sides, cut, length)
    margin = np.array([_margin(row, columns)], np.float32)
    head = np.array([len(cut[0]), *margin.view(np.int32)], np.int32)
    return np.concatenate([head, *cut])


def _margin(row: Row, columns: Mapping[str, str]) -> float:
    """Return the margin of a row, 0 without a column. Raise ValueError if it is not a number."""
    value = row[columns["margin"]] if columns.get("margin") else 0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not is_finite(value):
        raise ValueError(
            f"the margin is {brief(value)}; a finite number is needed: how much better the chosen "
            "answer is, in float32"
        )
    return float(value)


_PROMPT = "\0prompt"  # no column has these names
_ANSWER = "\0answer"
_COMPLETION = {"messages": "", "prompt": _PROMPT, "completion": _ANSWER}


def _check_cut(
    sides: Sequence[NDArray[np.int32]], cut: Sequence[NDArray[np.int32]], length: int
) -> None:
    """Raise ValueError if nothing can be learned from a pair as it is cut."""
    for side, whole, tokens in zip(SIDES, sides, cut, strict=True):
        if not (tokens[1:] >= 0).any():
            before = int((whole >= 0).argmax())
            raise ValueError(
                f"{side}: the answer is empty after the cut at {length:,} tokens, because its "
                f"prompt has {before:,}; raise task.length, or set task.overlong drop"
            )
    if np.array_equal(token_ids(cut[0]), token_ids(cut[1])):
        if max(map(len, sides)) <= length + 1:
            raise ValueError(_EQUAL)
        raise ValueError(
            f"after the cut at {length:,} tokens, both answers are equal, so nothing can be "
            "learned from the pair; raise task.length, or set task.overlong drop"
        )


def _parts(row: Row, columns: Mapping[str, str]) -> tuple[Any, dict[str, Any]]:
    """Return the prompt and both answers of a row, as texts or as messages.

    Raise ValueError if one is missing, or if they have several forms or prompts.
    """
    # Both answers must be there.
    answers = {side: row[columns[side]] for side in SIDES}
    for side, answer in answers.items():
        if is_missing(answer):
            raise ValueError(f"it has no {side} answer; fill {columns[side]!r}, or remove the row")

    # Answers and prompt are texts or messages.
    prompt = entry(row, columns, "prompt")
    lists = {}
    for name, value in {**answers, "prompt": prompt}.items():
        if is_missing(value) or is_text(value):
            continue
        try:
            lists[name] = conversation(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    given = lists.pop("prompt", None)
    if len(lists) == 1:
        raise ValueError(
            "one of the answers is a text, and the other messages; both must be texts, or both "
            "messages"
        )

    # Texts have a prompt, or begin equally.
    if not lists:
        if given:
            raise ValueError("the prompt is messages, and the answers are texts; use one form")
        if not columns.get("prompt"):
            return _common_beginning(*answers.values())
        if is_missing(prompt):
            raise ValueError(
                "the prompt is empty; fill it, or remove the row; if all texts begin with their "
                "prompts, ignore the column: task.prompt ''"
            )
        return prompt, answers

    # Messages: answers alone after a prompt, which may be a text; else whole conversations.
    alone = all(messages[0]["role"] == "assistant" for messages in lists.values())
    if alone and not is_missing(prompt):
        return given or [{"role": "user", "content": prompt}], lists
    before, ends = _common_beginning(*lists.values())
    if given is not None and before != given:
        raise ValueError(
            f"the prompt has {len(given)} messages, and is not what both conversations have in "
            f"common before the answers ({len(before)} messages); give the answers alone, or "
            "ignore the column: task.prompt ''"
        )
    return before, ends


def _common_beginning(chosen: Any, rejected: Any) -> tuple[Any, dict[str, Any]]:
    """Return the longest common beginning of two texts or conversations, and both ends.

    As in TRL, a blank at the end of the beginning of texts belongs to the answers. Raise ValueError
    if there is no common beginning, if an end is empty, or if conversations do not differ first in
    what the assistant answers.
    """
    if chosen == rejected:
        raise ValueError(_EQUAL)
    same = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            break
        same += 1
    for side, answer in zip(SIDES, (chosen, rejected), strict=True):
        if len(answer) == same:
            raise ValueError(
                f"{side}: it is only the beginning of the other side, so its answer is empty; "
                "fill it, remove the row, or put the prompt into the column task.prompt"
            )
    if not is_text(chosen):
        _check_differing(chosen[same], rejected[same], same)
    elif same and chosen[same - 1] == " ":
        same -= 1
    if not same:
        raise ValueError(
            "both sides have no common beginning, so their prompt is missing, or there are two; "
            "put it into the column task.prompt, or begin both sides with it"
        )
    return chosen[:same], {"chosen": chosen[same:], "rejected": rejected[same:]}


def _check_differing(chosen: dict[str, Any], rejected: dict[str, Any], number: int) -> None:
    """Raise ValueError if two messages do not differ in what the assistant answers."""
    differing = {}
    for key in {**chosen, **rejected}:
        values = chosen.get(key), rejected.get(key)
        if values[0] != values[1]:
            differing[key] = f"{key} ({' and '.join(map(brief, values))})"
    role = chosen["role"]
    if {role, rejected["role"]} != {"assistant"} or differing.keys().isdisjoint(ANSWERS):
        raise ValueError(
            f"the prompts of the pair differ: message {number} from {role} differs in "
            f"{', '.join(differing.values())}; both sides need one prompt, and may differ first in "
            "what the assistant answers"
        )
