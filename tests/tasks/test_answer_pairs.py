"""Rows as pairs of answers: TRL's layouts, cuts, wrong rows, and samples that are packed or
padded."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import border_pairs
from chats import CHATML, a_model, tokenizer_of, tokenizer_with, turns, written
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.conversations import column_choices
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.language.pair_rows import PAIRS
from oneloop.tasks.language.pairs import encoded_pair
from oneloop.tasks.language.sequences import IGNORE, Sample, Samples, paired
from oneloop.tasks.packaged_rows import PackagedRows
from oneloop.tasks.preference import RECORD, Preference
from oneloop.tasks.reward import Reward
from oneloop.tasks.rows.cached_arrays import Ragged, make_row
from worlds import ROOT

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.answer_rows",
    "oneloop.tasks.language.pair_rows",
    "oneloop.tasks.language.documents",
    "oneloop.tasks.language.sequences",
    "oneloop.tasks.language.token_rows",
    "oneloop.tasks.packaged_rows",
    "oneloop.tasks.language.pairs",
)

COLUMNS = {
    "prompt": "prompt",
    "chosen": "chosen",
    "rejected": "rejected",
    "tools": "",
    "system": "",
}
ASK = [{"role": "user", "content": "what is it?"}]
GOOD = [{"role": "assistant", "content": "the answer"}]
BAD = [{"role": "assistant", "content": "no"}]


def pair_of(row: dict[str, Any], *, length: int = 200, overlong: Any = "cut", **more: str) -> Any:
    """Return the array of a row; a column that the row lacks is not used."""
    tokenizer = tokenizer_of("ours")
    columns = {key: name if name in row else "" for key, name in COLUMNS.items()} | more
    return encoded_pair(row, columns, tokenizer, Chat(tokenizer), length=length, overlong=overlong)


def sides_of(pair: Any) -> tuple[Any, Any]:
    return pair[2 : 2 + pair[0]], pair[2 + pair[0] :]


def texts_of(side: Any) -> tuple[str, str]:
    """Return the prompt's text, and the trained text. (A line break may follow.)"""
    tokenizer = tokenizer_of("ours")
    trained = np.flatnonzero(side >= 0)
    first, last = trained[0], trained[-1]
    assert len(trained) == last - first + 1
    ids = token_ids(side)
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first : last + 1])


CHAT_PROMPT = "<|im_start|>user\nwhat is it?<|im_end|>\n<|im_start|>assistant\n"
TEXT_END = "<|im_end|>"
TEXT_ROW = {"prompt": "the word is", "chosen": " good", "rejected": " bad x"}
MESSAGE_ROWS: dict[str, dict[str, Any]] = {
    "prompt and answers": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "whole conversations": {"chosen": ASK + GOOD, "rejected": ASK + BAD},
    "an empty prompt beside them": {"prompt": "", "chosen": ASK + GOOD, "rejected": ASK + BAD},
    "a text beside them": {"prompt": "x", "chosen": ASK + GOOD, "rejected": ASK + BAD},
    "their prompt beside them": {"prompt": ASK, "chosen": ASK + GOOD, "rejected": ASK + BAD},
    "a text and answers": {"prompt": "what is it?", "chosen": GOOD, "rejected": BAD},
    "JSON": {"prompt": json.dumps(ASK), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)},
    "ShareGPT": {
        "chosen": [
            {"from": "human", "value": "what is it?"},
            {"from": "gpt", "value": "the answer"},
        ],
        "rejected": [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "no"}],
    },
}


@pytest.mark.parametrize("name", MESSAGE_ROWS)
def test_all_layouts_of_messages_are_one_pair(name):
    chosen, rejected = sides_of(pair_of(MESSAGE_ROWS[name]))
    assert texts_of(chosen) == (CHAT_PROMPT, f"the answer{TEXT_END}")
    assert texts_of(rejected) == (CHAT_PROMPT, f"no{TEXT_END}")


def test_texts_are_concatenated_and_end_with_the_end_token():
    chosen, rejected = sides_of(pair_of(TEXT_ROW))
    assert texts_of(chosen) == ("the word is", f" good{TEXT_END}")
    assert texts_of(rejected) == ("the word is", f" bad x{TEXT_END}")


def test_the_system_prompt_and_later_turns_belong_to_both_sides():
    begin = turns("a", "b", "the word")
    row = {"chosen": begin + GOOD, "rejected": begin + BAD, "system": "x"}
    chosen, rejected = sides_of(pair_of(row, system="system"))
    assert texts_of(chosen)[0] == texts_of(rejected)[0]
    assert texts_of(chosen)[0].startswith("<|im_start|>system\nx<|im_end|>")
    assert "assistant\nb<|im_end|>" in texts_of(chosen)[0]
    assert texts_of(chosen)[1] == f"the answer{TEXT_END}"


IMPLICIT: dict[str, dict[str, Any]] = {
    "texts": {"chosen": "the word is good", "rejected": "the word is not"},
    "a border inside of a word": {"chosen": "the word is it", "rejected": "the word is in it"},
    "messages": {"chosen": ASK + GOOD, "rejected": ASK + BAD},
    "later turns": {
        "chosen": turns("a", "b", "c", "the answer", "x", "d"),
        "rejected": turns("a", "b", "c", "no"),
    },
    "a text beside messages": MESSAGE_ROWS["a text beside them"],
    "prompt and answers": MESSAGE_ROWS["prompt and answers"],
    "prompt and texts": TEXT_ROW,
}


@pytest.mark.parametrize("name", IMPLICIT)
def test_the_common_beginning_is_that_of_trl(name):
    utils = pytest.importorskip("trl.data_utils")  # needs Python 3.11
    from oneloop.tasks.language.pairs import _parts

    row = IMPLICIT[name]
    expected = utils.maybe_extract_prompt(row)
    columns = {key: name if name in row else "" for key, name in COLUMNS.items()}
    prompt, answers = _parts(row, columns)
    assert {"prompt": prompt, **answers} == {key: expected[key] for key in ("prompt", *answers)}


def by_definition(row: dict[str, str], tokenizer: Any) -> tuple[list[int], ...]:
    """Return the tokens of the prompt and of both answers, as TRL defines them."""
    from oneloop.tasks.language.pairs import _parts

    # Tokenize the prompt, and the prompt with each answer and an end token.
    columns = {key: name if name in row else "" for key, name in COLUMNS.items()}
    prompt, answers = _parts(row, columns)
    end = tokenizer.eos_token
    texts = [prompt]
    texts += [prompt + answer.removesuffix(end) + end for answer in answers.values()]
    ids = [tokenizer(text)["input_ids"] for text in texts]

    # The answers begin at the first difference.
    border = 0
    while border < min(map(len, ids)) and len({one[border] for one in ids}) == 1:
        border += 1
    return ids[0][:border], ids[1][border:], ids[2][border:]


def without_second_end(answer: list[int]) -> list[int]:
    """Return tokens without the end token that a tokenizer adds to the one of the text."""
    return answer[:-1] if answer[-2:-1] == answer[-1:] else answer


def test_pairs_of_the_border_are_forty():
    assert len(border_pairs.ROWS) == 40


@pytest.mark.parametrize("name", border_pairs.TOKENIZERS)
def test_both_answers_begin_at_the_first_token_that_differs(name):
    tokenizer = border_pairs.tokenizer_of(name)
    found = 0
    for row in border_pairs.ROWS:
        prompt, chosen, rejected = by_definition(row, tokenizer)
        columns = {key: name if name in row else "" for key, name in COLUMNS.items()}
        if not prompt:
            with pytest.raises(ValueError, match="or its first token continues into the answer"):
                encoded_pair(row, columns, tokenizer, None, length=200)
            continue
        sides = sides_of(encoded_pair(row, columns, tokenizer, None, length=200))
        for side, answer in zip(sides, (chosen, rejected), strict=True):
            border = len(prompt)
            assert token_ids(side[:border]).tolist() == prompt and (side[:border] < 0).all()
            assert side[border:].tolist() == without_second_end(answer), row
        found += 1
    assert found >= 30


def test_a_cut_or_a_drop_keeps_the_border():
    tokenizer = border_pairs.tokenizer_of("begin")
    row = {"prompt": "3 the c", "chosen": "at sat on the mat", "rejected": "u"}
    columns = {key: name if name in row else "" for key, name in COLUMNS.items()}
    whole = encoded_pair(row, columns, tokenizer, None, length=200)
    border = int((sides_of(whole)[0] >= 0).argmax())
    longest = max(map(len, sides_of(whole)))

    # The rejected side is "<s>", " the", " c", "u": its answer begins before " c".
    assert tokenizer.decode(sides_of(whole)[1][border:]) == " cu<|im_end|>"
    cut = sides_of(encoded_pair(row, columns, tokenizer, None, length=border))
    assert [int((side >= 0).argmax()) for side in cut] == [border, border]
    for length, count in ((longest - 2, 0), (longest - 1, len(whole))):
        made = encoded_pair(row, columns, tokenizer, None, length=length, overlong="drop")
        assert len(made) == count
    with pytest.raises(ValueError, match="the answer is empty after the cut"):
        encoded_pair(row, columns, tokenizer, None, length=border - 1)


def test_answers_are_cut_at_their_ends_or_the_pair_is_dropped():
    row = {"prompt": "the word is", "chosen": " good" * 30, "rejected": " bad"}
    whole, short = sides_of(pair_of(row))
    length = len(whole) - 5
    chosen, rejected = sides_of(pair_of(row, length=length))
    assert np.array_equal(chosen, whole[: length + 1]) and np.array_equal(rejected, short)
    for overlong in ("cut", "drop"):
        make = partial(pair_of, length=length, overlong=overlong)
        array, _, remarks = make_row([row], make, 0)
        limit = f"task.length ({length + 1} tokens)"
        subject = f"are longer than {limit}; task.overlong is {overlong}"
        assert remarks == {subject: (f"{len(whole)} tokens", "")}
    assert len(array) == 0
    assert len(pair_of(row, length=length - 1, overlong="drop")) == 0
    fits = pair_of(row, length=len(whole) - 1, overlong="drop")
    assert np.array_equal(fits, pair_of(row))


def test_a_margin_is_kept_to_the_bit():
    row = {**TEXT_ROW, "by": 0.1}
    pair = pair_of(row, margin="by")
    assert pair[1:2].view(np.float32)[0] == np.float32(0.1)
    assert pair_of(TEXT_ROW)[1] == 0
    lone = Ragged(pair, np.array([len(pair)]))
    assert np.int32(paired(lone, "")[0].number).view(np.float32) == np.float32(0.1)


ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no chosen answer": ({**TEXT_ROW, "chosen": None}, "it has no chosen answer; fill 'chosen'"),
    "an empty rejected answer": ({**TEXT_ROW, "rejected": ""}, "it has no rejected answer; fill"),
    "no messages": ({**MESSAGE_ROWS["JSON"], "rejected": []}, "it has no rejected answer; fill"),
    "equal texts": ({**TEXT_ROW, "chosen": " bad x"}, "both answers are equal, so nothing can"),
    "equal messages": (
        {"prompt": ASK, "chosen": GOOD, "rejected": GOOD},
        "both answers are equal, so nothing can be learned from the pair; remove the row",
    ),
    "equal conversations": (
        {"chosen": ASK + GOOD, "rejected": ASK + GOOD},
        "both answers are equal, so nothing can be learned from the pair; remove the row",
    ),
    "equal whole texts": ({"chosen": "a b", "rejected": "a b"}, "both answers are equal"),
    "a text and messages": (
        {"prompt": ASK, "chosen": GOOD, "rejected": "no"},
        "one of the answers is a text, and the other messages; both must be texts, or both",
    ),
    "messages before texts": (
        {"prompt": ASK, "chosen": "yes", "rejected": "no"},
        "the prompt is messages, and the answers are texts; use one form",
    ),
    "an empty prompt": ({**TEXT_ROW, "prompt": ""}, "the prompt is empty; fill it, or remove"),
    "other prompts": (
        {"chosen": turns("x", "y", "who?", "yes"), "rejected": turns("x", "y", "why?", "no")},
        "the prompts of the pair differ: message 2 from user differs in content ('who?' and ",
    ),
    "another prompt beside conversations": (
        {"prompt": turns("x"), "chosen": ASK + GOOD, "rejected": ASK + BAD},
        "the prompt has 1 messages, and is not what both conversations have in common before",
    ),
    "the beginning of the other": (
        {"chosen": ASK + GOOD, "rejected": ASK},
        "rejected: it is only the beginning of the other side, so its answer is empty",
    ),
    "answers without a prompt": (
        {"chosen": GOOD, "rejected": BAD},
        "both sides have no common beginning, so their prompt is missing",
    ),
    "an empty list as the prompt": (
        {"prompt": [], "chosen": GOOD, "rejected": BAD},
        "both sides have no common beginning, so their prompt is missing",
    ),
    "whole texts that begin differently": (
        {"chosen": "a b", "rejected": "c b"},
        "both sides have no common beginning, so their prompt is missing, or there are two; put it",
    ),
    "a text that is the beginning": (
        {"chosen": "a b", "rejected": "a"},
        "rejected: it is only the beginning of the other side, so its answer is empty; fill it",
    ),
    "an empty message": (
        {"prompt": ASK, "chosen": GOOD, "rejected": turns("", first="assistant")},
        "rejected: message 0: the assistant's answer is empty; fill it, or remove the row",
    ),
    "a number": (
        {**TEXT_ROW, "chosen": 5},
        "chosen: expected a list of messages, got 5; a message has role and content",
    ),
    "nothing but a number": (
        {**TEXT_ROW, "chosen": 0},
        "chosen: expected a list of messages, got 0",
    ),
    "an object": (
        {**TEXT_ROW, "chosen": {"text": "yes"}},
        "chosen: expected a list of messages, got {'text': 'yes'}; a message has role and content",
    ),
    "an empty object": (
        {**TEXT_ROW, "rejected": {}},
        "rejected: expected a list of messages, got {}; a message has role and content",
    ),
    "a list of texts": (
        {**TEXT_ROW, "chosen": ["yes"]},
        "chosen: message 0 must have role and content, got 'yes'",
    ),
    "an object as the prompt": (
        {**TEXT_ROW, "prompt": {"question": "why?"}},
        "prompt: expected a list of messages, got {'question': 'why?'}; a message has role",
    ),
    "a number as the prompt": (
        {"prompt": 0, "chosen": ASK + GOOD, "rejected": ASK + BAD},
        "prompt: expected a list of messages, got 0; a message has role and content",
    ),
    "no prompt beside texts": (
        {**TEXT_ROW, "prompt": None},
        "the prompt is empty; fill it, or remove the row; if all texts begin with their prompts,",
    ),
    "another key of a prompt": (
        {"chosen": [{**ASK[0], "id": 1}, *GOOD], "rejected": [{**ASK[0], "id": 2}, *BAD]},
        "the prompts of the pair differ: message 0 from user differs in id (1 and 2); both sides",
    ),
    "another key of an earlier answer": (
        {
            "chosen": [*ASK, {**GOOD[0], "id": 1}, *turns("x", "y")],
            "rejected": [*ASK, *GOOD, *turns("x", "z")],
        },
        "the prompts of the pair differ: message 1 from assistant differs in id (1 and nothing);",
    ),
    **{
        f"content {content}": (
            {"prompt": ASK, "chosen": [{"role": "assistant", "content": content}], "rejected": BAD},
            f"chosen: message 0: its content is {content}; text is needed",
        )
        for content in (0, False, 0.0, {})
    },
    "no list of calls": (
        {"prompt": ASK, "chosen": [{**BAD[0], "content": "", "tool_calls": {}}], "rejected": BAD},
        "chosen: message 0: its tool_calls are {}; a list of objects is needed",
    ),
    "two numbers": (
        {**TEXT_ROW, "chosen": 5, "rejected": 6},
        "chosen: expected a list of messages, got 5",
    ),
    "a user's answer": (
        {"prompt": ASK, "chosen": turns("x"), "rejected": turns("y")},
        "the prompts of the pair differ: message 0 from user differs in content ('x' and 'y')",
    ),
}


def test_one_message_is_a_list_of_one():
    row = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
    expected = pair_of(row)
    assert np.array_equal(pair_of({key: value[0] for key, value in row.items()}), expected)
    sharegpt = {
        "prompt": {"from": "human", "value": "what is it?"},
        "chosen": {"from": "gpt", "value": "the answer"},
        "rejected": {"from": "gpt", "value": "no"},
    }
    assert np.array_equal(pair_of(sharegpt), expected)
    assert np.array_equal(pair_of({**sharegpt, "prompt": "what is it?"}), expected)


@pytest.mark.parametrize("name", ROWS)
def test_a_wrong_row_is_rejected_with_advice(name):
    row, expected = ROWS[name]
    with pytest.raises(ValueError) as caught:
        pair_of(row)
    assert str(caught.value).startswith(expected), caught.value


def test_a_cut_without_an_answer_or_a_difference_is_rejected():
    chosen, _ = sides_of(pair_of(MESSAGE_ROWS["prompt and answers"]))
    prompt = int((chosen >= 0).argmax())
    with pytest.raises(ValueError) as caught:
        pair_of(MESSAGE_ROWS["prompt and answers"], length=prompt - 1)
    assert str(caught.value) == (
        f"chosen: the answer is empty after the cut at {prompt - 1} tokens, because its prompt has "
        f"{prompt}; raise task.length, or set task.overlong drop"
    )
    row = {"prompt": "the", "chosen": " word" * 20 + " a", "rejected": " word" * 20 + " x"}
    with pytest.raises(ValueError, match="after the cut at 10 tokens, both answers are equal"):
        pair_of(row, length=10)


@pytest.mark.parametrize("value", [None, "much", float("nan"), True, 1e39, -(10**400)])
def test_a_margin_must_be_a_number(value):
    with pytest.raises(ValueError, match="a finite number is needed: how much better the chosen"):
        pair_of({**TEXT_ROW, "by": value}, margin="by")


def test_columns_are_chosen_with_a_prompt_if_there_is_one():
    names = {"prompt": "q", "chosen": "a", "rejected": "b", "tools": "t", "system": "s"}
    chosen = column_choices(names, PAIRS)
    found = [{key for key, name in one.items() if name} for one in chosen]
    assert found[0] == set(names) and found[-1] == {"chosen", "rejected"}
    assert len(found) == 8 and found[3] == {"prompt", "chosen", "rejected"}
    plain = {**names, "prompt": "", "tools": "", "system": ""}
    without = column_choices(plain, PAIRS)
    assert without == [plain]
    kinds = [(*kind, "margin") for kind in PAIRS]
    of_rewards = column_choices({**names, "margin": "m"}, kinds)
    assert len(of_rewards) == 8 and all(one["margin"] == "m" for one in of_rewards)


# --- samples


def drawn(count: int, *, seed: int = 0, most: int = 20) -> tuple[Ragged, list[Any]]:
    """Return random pairs as an array, with dropped ones between them; and their spans."""
    rng = np.random.default_rng(seed)
    arrays = []
    pairs = []
    for number in range(count):
        sides = []
        prompt = ~rng.integers(1, 90, rng.integers(1, 6))
        for _ in range(2):
            answer = rng.integers(1, 90, rng.integers(1, most - 6))
            sides.append(np.concatenate([prompt, answer]).astype(np.int32))
        head = np.array([len(sides[0]), np.float32(number).view(np.int32)], np.int32)
        arrays.append(np.concatenate([head, *sides]))
        pairs.append(sides)
        if number % 3 == 0:
            arrays.append(np.zeros(0, np.int32))
    ends = np.cumsum([len(one) for one in arrays])
    return Ragged(np.concatenate(arrays), ends), pairs


def test_dropped_pairs_are_left_out_and_documents_are_numbered():
    ragged, pairs = drawn(40)
    for room in (0, 40):
        made = paired(ragged, "", room=room, content={"made by": "test"})
        numbers = made.tokens[made.starts[::2] - 1]
        assert numbers.view(np.float32).tolist() == [*range(40)]
        assert len(made.starts) == 80
        for number, (chosen, rejected) in enumerate(pairs):
            assert np.array_equal(made.document(2 * number), chosen)
            assert np.array_equal(made.document(2 * number + 1), rejected)
            assert made.lengths[number] == len(chosen) + len(rejected) - 2
        assert made.fingerprint() == {"samples": len(made), "made by": "test"}

    # Each pair is in one row, and no row has more than twice the length.
    packed = paired(ragged, "", room=40)
    seen = []
    for sample in (packed[index] for index in range(len(packed))):
        assert sample.is_row and sum(len(side) - 1 for side in sample.documents) <= 40
        assert len(sample.documents) <= packed.most
        seen += [side.tobytes() for side in sample.documents[::2]]
    assert sorted(seen) == sorted(chosen.tobytes() for chosen, _ in pairs)
    assert packed.fingerprint() is None

    empty = Ragged(np.zeros(0, np.int32), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="all 3 pairs are longer than 20 tokens; raise it, or set"):
        paired(empty, "20 tokens")


def test_the_hash_depends_on_tokens_and_ends_alone():
    ragged, pairs = drawn(40)
    made = paired(ragged, "")
    expected = made.freeze(RECORD, targets=False).content

    # Another mask is the same content; with marks it is another.
    unmasked = Ragged(ragged.values.copy(), ragged.ends)
    for number in range(80):
        unmasked.values[made.starts[number] : made.stops[number]] = token_ids(made.document(number))
    other = paired(unmasked, "")
    assert other.freeze(RECORD, targets=False).content == expected
    assert other.freeze(RECORD, targets=True).content != made.freeze(RECORD, targets=True).content

    # Where the documents are stored changes nothing.
    spans = [side for pair in pairs for side in pair]
    stops = np.cumsum([len(span) for span in spans])
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])
    assert (
        Samples(np.concatenate(spans), starts, stops).freeze(RECORD, targets=False).content
        == expected
    )

    # Another token, or another end, is another content.
    changed = np.concatenate(spans)
    changed[-1] += 1
    assert Samples(changed, starts, stops).freeze(RECORD, targets=False).content != expected
    stops[3] += 1
    starts[4] += 1
    assert (
        Samples(np.concatenate(spans), starts, stops).freeze(RECORD, targets=False).content
        != expected
    )


class Filled:
    """Outputs whose records are known: the document's number and the position."""

    def __init__(self, samples: Samples) -> None:
        self.lengths = samples.sizes

    def __getitem__(self, document: int) -> Any:
        records = np.zeros(self.lengths[document] - 1, RECORD)
        records["logp"] = -document - np.arange(len(records)) / 3
        return records


def collating(most: int) -> Preference:
    """Return a task that only collates pairs of up to 20 tokens each."""
    task = Preference.__new__(Preference)
    task.length = 20
    task._max_documents = most
    return task


def test_packed_pairs_have_the_sums_of_padded_ones():
    ragged, pairs = drawn(40)
    rng = np.random.default_rng(1)
    values = {side.tobytes(): rng.normal(size=len(side) - 1) for pair in pairs for side in pair}
    packed = paired(ragged, "", room=40)
    padded = paired(ragged, "")
    for made in (packed, padded):
        outputs = made.freeze(RECORD, targets=False)
        assert made.outputs is outputs
        outputs.are_placeholders = True
        records = made[0].records
        assert len(records) == len(made[0].documents)
        assert all((one["logp"] == 0).all() for one in records)
        made.outputs = Filled(made)  # type: ignore[assignment]

    # The sums of a padded batch are those of each side.
    task = collating(2)
    batch = task.collate([padded[index] for index in range(40)])
    assert batch["reference"].shape == (*batch["target"].shape, 2) and task.weight(batch) == 40
    reference = batch["reference"].double().sum(-1)
    token_values = torch.zeros(batch["target"].shape, dtype=torch.float64)
    for row in range(80):
        side = padded.document(row)
        token_values[row, : len(side) - 1] = torch.from_numpy(values[side.tobytes()])
        expected = -row - torch.arange(len(side) - 1, dtype=torch.float64) / 3
        is_target = batch["target"][row] != IGNORE
        assert np.array_equal(is_target[: len(side) - 1], side[1:] >= 0)
        expected = expected[is_target[: len(side) - 1]]
        assert torch.allclose(reference[row][is_target], expected, rtol=1e-14, atol=0)
        assert (reference[row][~is_target] == 0).all()
    apart = task._answer_sums(token_values, batch)
    assert [float(one) for one in apart[0]] == pytest.approx(
        [values[chosen.tobytes()].sum() for chosen, _ in pairs], rel=1e-13
    )

    # Rows of several pairs, whose empty places count nothing.
    rows: list[Sample] = [packed[index] for index in range(len(packed))]
    task = collating(packed.most + 2)
    batch = task.collate(rows)
    assert task.weight(batch) == 40
    is_target = batch["target"] != IGNORE
    mask = task._answer_sums(is_target, batch)[0] > 0
    token_values = torch.zeros(batch["target"].shape, dtype=torch.float64)
    for number, row in enumerate(rows):
        joined = np.concatenate([values[side.tobytes()] for side in row.documents])
        token_values[number, : len(joined)] = torch.from_numpy(joined)
    chosen, rejected = task._answer_sums(token_values, batch)
    members = np.concatenate([packed.groups(index) for index in range(len(packed))])
    assert mask.sum() == 40 and len(mask) == len(rows) * (packed.most // 2 + 1)
    assert (chosen[~mask] == 0).all() and (rejected[~mask] == 0).all()
    assert torch.allclose(chosen[mask], apart[0][members], rtol=1e-13, atol=1e-13)
    assert torch.allclose(rejected[mask], apart[1][members], rtol=1e-13, atol=1e-13)
    sums = task._answer_sums(batch["reference"].double().sum(-1), batch)[1][mask]
    for at, number in enumerate(members):
        document = packed.document(2 * int(number) + 1)
        records = packed.outputs[2 * int(number) + 1]["logp"]  # type: ignore[index]
        assert float(sums[at]) == pytest.approx(records[document[1:] >= 0].sum(), rel=1e-12)


# --- the task


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def task_of(
    folder: Path, rows: list[Any], *, held: list[Any] | None = None, **keys: Any
) -> Preference:
    model = a_model(folder / "model", tokenizer_with(CHATML, PLAIN))
    data = written(folder / "data", rows, held=held)
    return Preference(str(data), model=str(model), length=64, **keys)


def test_the_task_reads_files_and_names_wrong_rows(tmp_path):
    rows = [{"prompt": f"the word {at} is", "chosen": " it", "rejected": " x"} for at in range(9)]
    task = task_of(tmp_path, rows)
    assert len(task.samples["train"].starts) == 18 and len(task.eval_sets()["validation"]) == 1
    [line] = [line for line in task.notes if line.startswith("a pair: ")]
    assert line == "a pair: 'the word 0 is', chosen ' it<|im_end|>', rejected ' x<|im_end|>'"
    with pytest.raises(ValueError, match=r"train\.jsonl, row 4: both answers are equal"):
        task_of(tmp_path, [*rows[:4], {**rows[4], "chosen": " x"}, *rows[5:]])
    skipping = task_of(tmp_path, [*rows[:4], {**rows[4], "chosen": " x"}], unreadable="skip")
    assert len(skipping.samples["train"].starts) == 8 and len(skipping.skipped_rows) == 1

    # Of a row with an unknown column, the message names the keys.
    with pytest.raises(ValueError, match="cannot find 'chosen'.*task.chosen"):
        task_of(tmp_path, [{"prompt": "a", "good": "b", "rejected": "c"}] * 3)
    named = [{"prompt": "the", "good": f" word {at}", "rejected": " c"} for at in range(3)]
    assert len(task_of(tmp_path, named, chosen="good").train_set()) == 1
    long = [{**row, "chosen": " word" * 80} for row in rows]
    with pytest.raises(ValueError, match="train: all 9 pairs are longer than task.length"):
        task_of(tmp_path, long, overlong="drop")
    # This row is a conversation, but the first is a text.
    mixed = [*rows, {"prompt": ASK, "chosen": GOOD, "rejected": BAD}]
    with pytest.raises(ValueError, match="row 9: chosen: this row is a conversation, but others"):
        task_of(tmp_path, mixed)


def test_a_column_without_any_prompt_is_ignored_and_a_null_beside_prompts_is_an_error(tmp_path):
    rows = [{"chosen": f"word {at} is it", "rejected": f"word {at} is x"} for at in range(9)]
    plain = task_of(tmp_path / "plain", rows)
    empty = task_of(tmp_path / "empty", [{**row, "prompt": None} for row in rows])
    for number in (6, 7):
        sides = [task.samples["train"].document(number) for task in (plain, empty)]
        assert np.array_equal(*sides)
    with pytest.raises(ValueError, match=r"row 3: the prompt is empty; .* task.prompt ''"):
        task_of(
            tmp_path / "some",
            [{**row, "prompt": None if at == 3 else "w"} for at, row in enumerate(rows)],
        )
    # In a split without any prompt, too, if others have prompts.
    prompted = [{**row, "prompt": "w"} for row in rows]
    with pytest.raises(ValueError, match=r"validation\.jsonl, row 0: the prompt is empty"):
        task_of(tmp_path / "other", prompted, held=[{**rows[0], "prompt": None}])


def test_the_task_reads_the_packaged_pairs(tmp_path, monkeypatch):
    """A few of them, with a model whose tokenizer exists."""

    class Few(PackagedRows):
        def __init__(self, name: str, split: str) -> None:
            super().__init__(name, split)
            del self[12:]

    monkeypatch.setattr("oneloop.tasks.language.token_rows.PackagedRows", Few)
    a_model(tmp_path / "model", tokenizer_with(CHATML, PLAIN))
    for kind in (Preference, Reward):
        task = kind("lessons", model=str(tmp_path / "model"), length=512)
        assert len(task.samples["train"].starts) == 24


def test_the_packaged_pairs_have_a_right_and_a_wrong_answer_of_the_last_question(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from packaged_rows import full_question, right_answers

    right = dict(right_answers())
    for part, least in (("train", 3000), ("validation", 150), ("test", 150)):
        pairs = PackagedRows("answer_pairs", part)
        assert len(pairs) > least and pairs.fingerprint() and part in pairs.where(0)
        for pair in pairs:
            asked = [one["content"] for one in pair["prompt"] if one["role"] == "user"]
            answer = right[full_question(asked)]
            assert pair["chosen"][0]["content"] == answer != pair["rejected"][0]["content"]


def test_the_packaged_rows_are_what_their_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from packaged_rows import FOLDER, contents, digits

    written = dict(contents())
    assert {file.name for file in FOLDER.iterdir()} == written.keys() | {"digits.npz"}
    with np.load(FOLDER / "digits.npz") as arrays:
        for name, values in digits().items():
            assert np.array_equal(arrays[name], values) and arrays[name].dtype == values.dtype
    for name, lines in written.items():
        assert gzip.decompress((FOLDER / name).read_bytes()) == lines
