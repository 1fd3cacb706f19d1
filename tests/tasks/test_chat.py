"""Which tokens of a conversation are trained: with several families of templates, in texts, and in
the loss."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import processors
from torch.nn import functional as F

from chats import (
    CHATML,
    FAMILIES,
    PREFIXES,
    TRLS,
    Messages,
    a_model,
    calls,
    of_trl,
    tokenizer_of,
    tokenizer_with,
    turns,
    written,
)
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.completions import completed
from oneloop.tasks.language.conversations import encoded
from oneloop.tasks.language.sequences import IGNORE, cut_texts
from oneloop.tasks.sft import SFT
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.chat",
    "oneloop.tasks.language.completions",
    "oneloop.tasks.language.conversations",
    "oneloop.tasks.language.sequences",
    "oneloop.tasks.rows.cached_arrays",
    "oneloop.tasks.sft",
)

NO_COLUMNS = {"messages": "", "prompt": "", "completion": "", "tools": ""}


@cache
def chat_of(name: str) -> Chat:
    return Chat(tokenizer_of(name))


# --- conversations
# --------------------------------------------------------------------------------------------------

BITS = (
    "the answer",
    "x",
    "é",
    "你好",
    "🙂🙂",
    "what is it?",
    "42",
    "a\n\nb",
    "end.",
    "«»",
    "    code()",
    "\tt",
)


def content(draw: random.Random) -> str:
    if draw.random() < 0.15:
        return draw.choice("axé7")
    edge = ("", "", " ", "\n", "  \n\n ", "\n\n")
    return (
        draw.choice(edge) + " ".join(draw.choices(BITS, k=draw.randint(1, 4))) + draw.choice(edge)
    )


def conversation(number: int, *, tools: bool) -> Messages:
    draw = random.Random(number)
    messages: Messages = (
        [{"role": "system", "content": content(draw)}] if draw.random() < 0.4 else []
    )
    for _ in range(draw.randint(1, 4)):
        messages.append({"role": "user", "content": content(draw)})
        while tools and draw.random() < 0.3:
            call = {
                "type": "function",
                "function": {"name": "look", "arguments": {"for": content(draw), "n": 3}},
            }
            asked = {
                "role": "assistant",
                "content": draw.choice(["", content(draw)]),
                "tool_calls": [call],
            }
            messages.append(
                asked | ({"reasoning_content": content(draw)} if draw.random() < 0.3 else {})
            )
            messages.append({"role": "tool", "name": "look", "content": content(draw)})
        answer: dict[str, Any] = {"role": "assistant", "content": content(draw)}
        messages.append(
            answer | ({"reasoning_content": content(draw)} if tools and draw.random() < 0.4 else {})
        )
    if draw.random() < 0.1:
        messages.append({"role": "user", "content": content(draw)})
    return messages


TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "finds it", "parameters": {}}}
]


# --- an independent check: the assistant's text is between two marks of its family
# ------------------------------------


@cache
def byte_of() -> dict[str, int]:
    """Map each letter of a byte-level vocabulary to its byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + at): byte for at, byte in enumerate(others)
    }


def pieces(tokenizer: Any, tokens: Sequence[int]) -> list[bytes]:
    """Return the bytes of each token."""
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    return [
        added[token].encode()
        if token in added
        else bytes(byte_of()[letter] for letter in tokenizer.convert_ids_to_tokens(token))
        for token in tokens
    ]


def by_rule(tokenizer: Any, text: str, spoken: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a rendered conversation, and whether each overlaps the text between the
    marks."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    each = pieces(tokenizer, tokens)
    assert b"".join(each) == text.encode()
    stops = np.cumsum([len(piece) for piece in each])
    starts = stops - [len(piece) for piece in each]
    trained = np.zeros(len(tokens), dtype=bool)
    for found in re.finditer(spoken, text, re.DOTALL):
        begin, end = len(text[: found.start(1)].encode()), len(text[: found.end(1)].encode())
        trained |= (starts < end) & (stops > begin)
    return tokens, trained.tolist()


def marked(tokenizer: Any, values: Any) -> str:
    """Return the text with «» around the trained tokens."""
    shown, before = "", False
    for value in [*values.tolist(), None]:
        trained = value is not None and value >= 0
        shown += ("«" if trained else "»") * (trained != before)
        shown, before = (
            shown + ("" if value is None else tokenizer.decode([value if trained else ~value])),
            trained,
        )
    return shown


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_is_what_the_assistant_states_and_the_end_of_its_turns(name):
    family, tokenizer, chat = FAMILIES[name], tokenizer_of(name), chat_of(name)
    template = of_trl(family.training) if family.training else None
    assert family.known_by in chat.note
    rejected = turns = 0
    for number in range(100):
        messages = conversation(number, tools=family.tools)
        tools = TOOLS if calls(messages) else None
        if family.rejects(messages):
            rejected += 1
            with pytest.raises(
                ValueError,
                match="the chat template raised an error: .*(alternate|Cannot pass both)",
            ):
                chat.encode(messages, tools)
            continue
        found = chat.encode(messages, tools)
        how = {"tools": tools, "chat_template": template}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **how)
        tokens, trained = by_rule(tokenizer, text, family.spoken)
        assert np.where(found < 0, ~found, found).tolist() == tokens
        assert (found >= 0).tolist() == trained, marked(tokenizer, found)
        if chat.marked:  # then transformers can compute the mask, too
            how |= {"return_dict": True, "return_assistant_tokens_mask": True}
            assert tokenizer.apply_chat_template(messages, **how)["assistant_masks"] == [
                *map(int, trained)
            ]
        ends = [at for at, mark in enumerate(trained) if mark and not [*trained, False][at + 1]]
        assert len(ends) == sum(one["role"] == "assistant" for one in messages), marked(
            tokenizer, found
        )
        last = [at - 1 if tokenizer.decode([tokens[at]]) == "\n" else at for at in ends]
        assert all(tokenizer.decode([tokens[at]]) in family.special for at in last)
        turns += len(ends)
    assert turns > 150 or name == "gemma 3"
    assert bool(rejected) == (name in ("gemma 3", "gpt-oss"))


SYSTEM = {"role": "system", "content": "Be kind."}
CALL = [{"type": "function", "function": {"name": "look", "arguments": {"n": 1}}}]
SHORT: Messages = [
    {"role": "user", "content": " hi"},
    {"role": "assistant", "content": "Yes. ", "reasoning_content": "Hm"},
    {"role": "user", "content": "é?"},
    {"role": "assistant", "content": "n"},
]
ASKED: Messages = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "tool_calls": CALL},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42"},
]
BY_HAND = {
    "ours": (
        [SYSTEM, *SHORT],
        (
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n "
            "hi<|im_end|>\n<|im_start|>assistant\n«Yes. "
            "<|im_end|>»\n<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n«n<|im_end|>»\n"
        ),
    ),
    "llama 3": (
        [SYSTEM, *SHORT],
        (
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe "
            "kind.<|eot_id|><|start_header_id|>user"
            "<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«Yes.<|eot_id|>»"
            "<|start_header_id|>user<|end_header_id|>\n\né?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            "«n<|eot_id|>»"
        ),
    ),
    "qwen 2.5": (
        [SYSTEM, *ASKED],
        (
            "<|im_start|>system\nBe "
            "kind.<|im_end|>\n<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"
            '«<tool_call>\n{"name": "look", "arguments": {"n": '
            "1}}\n</tool_call><|im_end|>»\n<|im_start|>user\n"
            "<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n«It is "
            "42<|im_end|>»\n"
        ),
    ),
    "qwen 3": (
        SHORT,
        (
            "<|im_start|>user\n "
            "hi<|im_end|>\n<|im_start|>assistant\n«<think>\nHm\n</think>\n\nYes. <|im_end|>\n»"
            "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n«<think>\n\n</think>\n\nn<|im_end|>\n»"
        ),
    ),
    "gemma 3": (
        [SYSTEM, *SHORT],
        (
            "<bos><start_of_turn>user\nBe "
            "kind.\n\nhi<end_of_turn>\n<start_of_turn>model\n«Yes.<end_of_turn>»\n"
            "<start_of_turn>user\né?<end_of_turn>\n<start_of_turn>model\n«n<end_of_turn>»\n"
        ),
    ),
    "phi 3": (
        [SYSTEM, *SHORT],
        (
            "<|system|>\nBe kind.<|end|>\n<|user|>\n hi<|end|>\n<|assistant|>\n«Yes. "
            "<|end|>\n»<|user|>\né?<|end|>\n"
            "<|assistant|>\n«n<|end|>\n<|endoftext|>»"
        ),
    ),
    "glm 4": (
        ASKED,
        (
            "[gMASK]<sop><|user|>\n?<|assistant|>«\n<think></think>\n<tool_call>look\n<arg_key>n</arg_key>\n<arg_value>1"
            "</arg_value>\n</tool_call><|observation|>»\n<tool_response>\n42\n</tool_response><|assistant|>«\n<think>"
            "</think>\nIt is 42<|user|>»"
        ),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_masks_as_they_are_written_by_hand(name):
    messages, expected = BY_HAND[name]
    assert marked(tokenizer_of(name), chat_of(name).encode(messages)) == expected


def test_a_token_of_header_and_answer_is_trained():
    found = chat_of("qwen 2.5").encode(
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\n\nx"}]
    )
    assert marked(tokenizer_of("qwen 2.5"), found).endswith("assistant«\n\n\nx<|im_end|>»\n")


def test_special_tokens_that_take_the_blanks_behind_them_are_not_trained_as_headers():
    family = FAMILIES["phi 3"]
    tokenizer = tokenizer_with(family.special, of_trl(family.template), rstrip=True)  # as in Phi 3
    chat = Chat(tokenizer)
    for inner in ("yes", " yes", "\n\n yes"):
        found = chat.encode(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": inner}]
        )
        header, *_ = tokenizer.convert_tokens_to_ids(["<|assistant|>"])
        assert header not in found.tolist() and ~header in found.tolist(), marked(tokenizer, found)


@pytest.mark.parametrize(
    "name",
    ["gemma 3", "glm 4", *(name for name in ("llama 3", "qwen 2.5", "qwen 3", "phi 3", "ours"))],
)
def test_contents_in_parts_are_their_texts(name):
    parts = [
        {"role": one["role"], "content": [{"type": "text", "text": one["content"]}]}
        for one in turns("hi", "yo")
    ]
    columns = NO_COLUMNS | {"messages": "messages"}
    found = [
        encoded({"messages": one}, columns, tokenizer_of(name), chat_of(name))
        for one in (parts, turns("hi", "yo"))
    ]
    assert np.array_equal(*found)


def test_an_end_that_takes_the_blanks_behind_it_is_trained():
    template = tokenizer_of("ours").chat_template
    for inner in ("yes", "yes \n"):
        found = Chat(tokenizer_with(CHATML, template, rstrip=True)).encode(
            turns("?", inner, "!", inner)
        )
        ids = tokenizer_with(CHATML, template, rstrip=True).convert_tokens_to_ids(CHATML)
        assert (
            (found == ids[1]).sum() == 2
            and (found == ~ids[1]).sum() == 2
            and (found != ids[0]).all()
        )


def test_marks_in_a_block_that_is_kept_first():
    template = (
        "{% for m in messages %}{% set turn %}<|im_start|>{{ m.role }}\n{% if m.role == "
        "'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% "
        "endif %}\n{% endset %}"
        "{{ turn }}{% endfor %}"
    )
    tokenizer = tokenizer_with(CHATML, template)
    try:
        found = Chat(tokenizer).encode(turns("hello", "yo"))
    except ValueError:
        return  # a rejection is also correct
    assert marked(tokenizer, found).rstrip().endswith("«yo<|im_end|>»")


def test_prompts_that_are_written_otherwise_alone():
    family = FAMILIES["phi 3"]
    tokenizer = tokenizer_with(
        (*family.special[:-1], "<|end_of_this_text|>"), of_trl(family.template)
    )
    row, columns = {"prompt": turns("?"), "completion": turns("c", first="assistant")}, NO_COLUMNS
    found = encoded(
        row, columns | {"prompt": "prompt", "completion": "completion"}, tokenizer, Chat(tokenizer)
    )
    assert marked(tokenizer, found).endswith("«c<|end|>\n<|end_of_this_text|>»")


def test_prompts_with_thoughts_that_the_template_drops_later():
    chat, columns = (
        chat_of("gpt-oss"),
        NO_COLUMNS | {"prompt": "prompt", "completion": "completion"},
    )
    asked = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "a", "reasoning_content": "thoughts"},
    ]
    row = {"prompt": asked, "completion": turns("b", "c")}
    found = encoded(row, columns, tokenizer_of("gpt-oss"), chat)
    assert marked(tokenizer_of("gpt-oss"), found).endswith("<|message|>c<|return|>»")


# --- rows
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return a_model(tmp_path_factory.mktemp("qwen"), tokenizer_of("qwen 2.5"))


def trained_of(task: SFT) -> list[str]:
    """Return the training samples as texts, in order."""
    rows = task.train_set()
    return [marked(task.tokenizer, rows[index]) for index in range(len(rows))]


@pytest.mark.parametrize(
    ("pack", "fused"), [("padded", False), ("packed", False), ("packed", True)]
)
def test_the_loss_counts_these_tokens_and_no_other(tmp_path, qwen, pack, fused):
    conversations = [conversation(number, tools=False) for number in range(40)]
    data = written(tmp_path / "data", [{"messages": one} for one in conversations])
    task = SFT(str(data), model=str(qwen), length=512, pack=pack, fused_loss=fused)
    mine, model = task.train_set(), task.model().double().eval()
    plain = (
        transformers.AutoModelForCausalLM.from_pretrained(qwen, attn_implementation="sdpa")
        .double()
        .eval()
    )
    tokenizer, family = tokenizer_of("qwen 2.5"), FAMILIES["qwen 2.5"]
    reference = {}
    for messages in conversations:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens, trained = by_rule(tokenizer, text, family.spoken)
        with torch.no_grad():
            logs = plain(torch.tensor([tokens])).logits[0].log_softmax(-1)
        each = [
            -logs[at - 1, tokens[at]].item() if trained[at] else 0.0 for at in range(1, len(tokens))
        ]
        reference[tuple(tokens)] = (each, sum(trained))
    seen = 0
    for first in range(0, len(mine), 4):
        samples = [mine[index] for index in range(first, min(first + 4, len(mine)))]
        batch = task.collate(samples)
        with torch.no_grad():
            total, outputs = task.loss(model, batch)
        rows, count = [], 0
        for sample in samples:
            members = sample if pack == "packed" else [sample]
            row = [reference[tuple(np.where(one < 0, ~one, one).tolist())] for one in members]
            rows.append([loss for each, _ in row for loss in each])
            count += sum(known for _, known in row)
            seen += len(members)
        width = batch["target"].shape[1]
        expected = torch.tensor(
            [[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64
        )
        assert torch.equal(expected > 0, batch["target"] != IGNORE)
        each = outputs["loss"].double()
        assert (each[expected == 0] == 0).all() and (each[expected > 0] > 0).all()
        assert torch.allclose(each, expected, rtol=0, atol=1e-5 if fused else 1e-9)
        assert total.item() == pytest.approx(expected.sum().item(), rel=1e-6 if fused else 1e-12)
        assert task.weight(batch).item() == count
    assert seen == len(conversations)


def test_prompts_and_completions_as_texts():
    plain = tokenizer_with(["</s>"], None)
    with_begin = tokenizer_with(["</s>"], None, begin="<s>")
    with_both = tokenizer_with(["</s>"], None, begin="<s>")
    ids = {name: with_begin.convert_tokens_to_ids(name) for name in ("<s>", "</s>")}
    for tokenizer, single in ((with_begin, "<s> $A"), (with_both, "<s> $A </s>")):
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[*ids.items()]
        )
    assert with_both("x")["input_ids"][-1] == with_both.eos_token_id
    for tokenizer, begin in ((plain, ""), (with_begin, "<s>"), (with_both, "<s>")):
        assert (
            marked(tokenizer, completed(tokenizer, "what is it?", " 42"))
            == f"{begin}what is it?« 42</s>»"
        )
        assert marked(tokenizer, completed(tokenizer, "a\n", "b</s>")) == f"{begin}a\n«b</s>»"
        if begin:
            assert marked(tokenizer, completed(tokenizer, "", "b")) == f"{begin}«b</s>»"
    with pytest.raises(
        ValueError,
        match="the prompt is empty, or its first token continues into the answer",
    ):
        completed(plain, "", "b")
    for tokenizer in (with_begin, with_both):  # no second <s> if the text begins with one
        assert marked(tokenizer, completed(tokenizer, "<s>what", "x")) == "<s>what«x</s>»"
    for prompt, completion in (("é🙂", "🙂é"), ("what is ", "it?"), ("a\n", "\nb")):
        tokens = completed(with_both, prompt, completion).tolist()
        each = pieces(with_both, [token if token >= 0 else ~token for token in tokens])
        assert b"".join(each).decode() == f"<s>{prompt}{completion}</s>"
        border = len(f"<s>{prompt}".encode())
        ends = np.cumsum([len(piece) for piece in each])
        assert [token >= 0 for token in tokens] == (ends > border).tolist()


def test_completions_of_a_tokenizer_that_ends_texts_with_another_token():
    tokenizer = tokenizer_with(("[SEP]", "</s>"), None)
    added = [("[SEP]", tokenizer.convert_tokens_to_ids("[SEP]"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]", special_tokens=added
    )
    assert marked(tokenizer, completed(tokenizer, "ab", "cd")).startswith("ab«cd")


def test_prompts_and_completions_in_rows(tmp_path, qwen):
    texts = [{"prompt": f"what is {n}?", "completion": f" it is {n}"} for n in range(6)]
    task = SFT(str(written(tmp_path / "texts", texts)), model=str(qwen), pack="padded")
    assert trained_of(task) == [f"what is {n}?« it is {n}<|im_end|>»" for n in range(6)]
    objects = [
        {"prompt": turns("a", "b", "c"), "completion": turns("d", "e", "f", first="assistant")}
    ]
    for rows in (
        objects,
        [{key: json.dumps(value) for key, value in row.items()} for row in objects],
    ):
        task = SFT(
            str(written(tmp_path / str(len(str(rows))), rows * 3)), model=str(qwen), pack="padded"
        )
        shown = trained_of(task)[0].partition("<|im_start|>user\n")[2]
        assert shown == (
            "a<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
            "«d<|im_end|>»\n<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n«f<|im_end|>»\n"
        )


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gpt-oss"])
def test_of_conversational_prompts_nothing_is_trained(name):
    chat, tokenizer = chat_of(name), tokenizer_of(name)
    columns = NO_COLUMNS | {"prompt": "prompt", "completion": "completion"}
    for number in range(40):
        messages = conversation(number, tools=False)
        whole = chat.encode(messages)
        for given in range(1, len(messages)):
            row = {"prompt": messages[:given], "completion": messages[given:]}
            found = encoded(row, columns, tokenizer, chat)
            turns_of = [one["role"] == "assistant" for one in messages]
            edges = np.flatnonzero(
                np.diff(np.concatenate([[0], (whole >= 0).astype(int), [0]])) == 1
            )
            skip = sum(turns_of[:given])
            border = edges[skip] if skip < len(edges) else len(whole)
            expected = np.where((np.arange(len(whole)) < border) & (whole >= 0), ~whole, whole)
            assert np.array_equal(found, expected), marked(tokenizer, found)


def test_rows_as_people_write_them(tmp_path, qwen):
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yo<|im_end|>»\n"
    plain = [{"messages": turns("hi", "yo")}] * 3
    as_json = [{"messages": json.dumps(turns("hi", "yo"))}] * 3
    shared = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}
    ] * 3
    more = [
        one | ({"name": "A"} if one["role"] == "user" else {"name": None, "weight": 1.0})
        for one in turns("hi", "yo")
    ]
    with_more = [{"id": 3, "messages": more, "tools": None}] * 3
    for number, rows in enumerate((plain, as_json, shared, with_more)):
        key = "conversations" if rows is shared else "messages"
        task = SFT(
            str(written(tmp_path / str(number), rows)), messages=key, model=str(qwen), pack="padded"
        )
        assert [one.partition("helpful assistant.<|im_end|>\n")[2] for one in trained_of(task)] == [
            expected
        ] * 3


def test_keys_that_hold_nothing_in_all_rows(tmp_path, qwen):
    rows = [
        {"messages": [one | {"name": None, "tool_calls": None} for one in turns("hi", "yo")]}
    ] * 3
    task = SFT(str(written(tmp_path / "data", rows)), model=str(qwen), pack="padded")
    assert trained_of(task)[0].endswith("«yo<|im_end|>»\n")


@pytest.mark.parametrize("text", ["[2, 1] sorted?", "[2, 1]"])
def test_prompts_that_look_like_lists_are_texts(tmp_path, qwen, text):
    rows = [{"prompt": "sort: ", "completion": "[1]"}, {"prompt": text, "completion": "[1, 2]"}]
    task = SFT(str(written(tmp_path / "data", rows)), model=str(qwen), pack="padded")
    assert trained_of(task) == ["sort: «[1]<|im_end|>»", f"{text}«[1, 2]<|im_end|>»"]


@pytest.mark.parametrize("indent", [None, 1])
def test_prompts_as_json_of_messages(tmp_path, qwen, indent):
    row = {
        "prompt": json.dumps(turns("a"), indent=indent),
        "completion": json.dumps(turns("b", first="assistant")),
    }
    task = SFT(str(written(tmp_path / "data", [row] * 3)), model=str(qwen), pack="padded")
    assert trained_of(task)[0].endswith("<|im_start|>assistant\n«b<|im_end|>»\n")


@pytest.mark.parametrize("kind", ["objects", "json"])
def test_tools_are_given_to_the_template(tmp_path, qwen, kind):
    tools: Any = TOOLS if kind == "objects" else json.dumps(TOOLS)
    arguments: Any = {"n": 1} if kind == "objects" else '{"n": 1}'
    call = [{"type": "function", "function": {"name": "look", "arguments": arguments}}]
    messages = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": call}, *ASKED[2:]]
    rows = [{"messages": messages, "tools": tools}, {"messages": turns("hi", "yo"), "tools": None}]
    task = SFT(str(written(tmp_path / "data", rows)), model=str(qwen), pack="padded", length=1024)
    with_tools, without = trained_of(task)
    assert (
        "# Tools" in with_tools
        and '"description": "finds it"' in with_tools
        and "# Tools" not in without
    )
    trained_texts = re.findall("«(.*?)»", with_tools, re.DOTALL)
    call_text = '<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call><|im_end|>'
    assert trained_texts == [call_text, "It is 42<|im_end|>"]


def test_padding_with_the_end_token_or_with_none_changes_nothing(tmp_path):
    data, kept = (
        str(
            written(
                tmp_path / "data",
                [{"messages": turns("hi", word)} for word in ("yo", "a b c", "x")],
            )
        ),
        [],
    )
    for pad in (None, "<|im_end|>", "<|pad|>"):
        tokenizer = tokenizer_with((*CHATML[:1], "<|pad|>", CHATML[1]), of_trl("qwen2_5"))
        tokenizer.pad_token = pad
        folder = a_model(tmp_path / str(pad).strip("<|>"), tokenizer)
        assert transformers.AutoTokenizer.from_pretrained(folder).pad_token == pad
        task = SFT(data, model=str(folder), pack="padded")
        rows = task.train_set()
        batch = task.collate([rows[index] for index in range(3)])
        ends = batch["target"] == tokenizer.eos_token_id
        assert ends.sum(1).tolist() == [1, 1, 1]
        with torch.no_grad():
            total, _ = task.loss(task.model().eval(), batch)
        kept.append((batch["input"].tolist(), batch["target"].tolist(), total.item()))
    assert kept[0] == kept[1] == kept[2]


# --- too long
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlong", ["cut", "split", "drop"])
def test_long_conversations_are_cut_split_or_dropped_and_counted(tmp_path, qwen, overlong):
    length, draw = 64, random.Random(1)
    short = [turns("hi", "x" * draw.randint(1, 9), "a", "b") for _ in range(12)]
    long = [
        turns("q" * draw.randint(5, 90), "z" * draw.randint(1, 200), "w", "v" * draw.randint(1, 30))
        for _ in short
    ]
    system = {"role": "system", "content": "!"}
    rows = [{"messages": [system, *one]} for pair in zip(short, long, strict=True) for one in pair]
    tokenizer, spoken = tokenizer_of("qwen 2.5"), FAMILIES["qwen 2.5"].spoken
    each = [
        by_rule(tokenizer, tokenizer.apply_chat_template(row["messages"], tokenize=False), spoken)
        for row in rows
    ]
    too_long = [len(tokens) > length + 1 for tokens, _ in each]
    data = str(written(tmp_path / "data", rows, held=[{"messages": [system, *short[0]]}]))
    task = SFT(data, model=str(qwen), pack="padded", length=length, overlong=overlong)
    mine = task.train_set()
    samples = [mine[index] for index in range(len(mine))]
    pieces_of: list[tuple[list[int], list[bool]]] = []
    for (tokens, trained), is_long in zip(each, too_long, strict=True):
        if overlong == "drop" and is_long:
            continue
        starts = range(0, max(1, len(tokens) - 1), length) if overlong == "split" else [0]
        pieces_of += [
            (tokens[at : at + length + 1], trained[at : at + length + 1]) for at in starts
        ]
    kept = [piece for piece in pieces_of if any(piece[1][1:])]
    assert [np.where(one < 0, ~one, one).tolist() for one in samples] == [
        tokens for tokens, _ in kept
    ]
    assert [(one >= 0).tolist() for one in samples] == [trained for _, trained in kept]
    of_train = [note for note in task.notes if note.startswith("train: ")]
    what = {"cut": "truncated", "split": "split into several", "drop": "dropped"}[overlong]
    begin = "" if overlong == "split" else "warning: "
    line = (
        f"train: {begin}{sum(too_long)} of {len(rows)} texts are longer than {length + 1} tokens "
        f"({length} targets) and are {what}"
    )
    if overlong == "cut":
        lost = sum(any(trained[length + 1 :]) for _, trained in each)
        line += f"; of {lost} the answer loses its end"
    wanted = [line]
    if empty := len(pieces_of) - len(kept):
        wanted.append(f"train: {empty} samples have no token to train on and are dropped")
    assert [note for note in of_train if note in wanted] == wanted and 0 < sum(too_long) < len(rows)
    assert overlong == "drop" or empty
    targets = sum(int((sample[1:] >= 0).sum()) for sample in samples)
    everything = sum(sum(trained) for _, trained in each)
    assert targets == everything if overlong == "split" else targets < everything


def test_split_conversations_hold_every_trained_token_once():
    from oneloop.tasks.rows.cached_arrays import Ragged

    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 60, 200)
    trained = draw.random(lengths.sum()) < 0.3
    numbers = np.arange(lengths.sum(), dtype=np.int32)
    texts = Ragged(np.where(trained, numbers, ~numbers), np.cumsum(lengths))
    for length in (1, 2, 7, 59):
        made = cut_texts(texts, length, "split")
        targets = np.concatenate([made[index].documents[0][1:] for index in range(len(made))])
        first = np.cumsum(lengths) - lengths  # a first token has no predecessor to predict it from
        expected = np.setdiff1d(numbers[trained], first)
        assert sorted(targets[targets >= 0].tolist()) == expected.tolist()
        assert max(made.lengths) <= length


# --- saved templates
# --------------------------------------------------------------------------------------------------

OTHER = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
def test_a_run_keeps_the_template_that_people_know(tmp_path, own):
    a_model(tmp_path / "qwen3", tokenizer_of("qwen 3"))
    written(
        tmp_path / "data", [{"messages": turns("hi", word)} for word in ("yo", "a b c", "x", "y")]
    )
    (tmp_path / "other.jinja").write_text(OTHER)
    words = [
        "digits",
        "--task",
        "sft",
        "--task.data",
        "data",
        "--task.model",
        "qwen3",
        "--task.length",
        "64",
    ]
    words += [
        "--duration",
        "2",
        "--batch.size",
        "1",
        "--eval.every",
        "0",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    world = run(
        train, [*words, *(["--task.chat_template", "other.jinja"] if own else [])], folder=tmp_path
    )
    world.ok()
    assert (PREFIXES if own else TRLS) in world.output
    kept = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    assert kept.chat_template == (OTHER if own else of_trl("qwen3"))
    assert kept.get_vocab() == tokenizer_of("qwen 3").get_vocab() and kept.eos_token == "<|im_end|>"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    batch = kept.apply_chat_template(
        turns("hi"), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert torch.isfinite(F.log_softmax(loaded(**batch).logits, -1)).all()
