"""Errors in chats, their templates and their models give one message: what was found and what to
do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from chats import CHATML, a_model, of_trl, tokenizer_of, tokenizer_with, turns, written
from oneloop.tasks.sft import SFT
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.attention",
    "oneloop.tasks.language.chat",
    "oneloop.tasks.language.completions",
    "oneloop.tasks.language.conversations",
    "oneloop.tasks.language.models",
    "oneloop.tasks.language.sequences",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.sft",
)

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [{"messages": turns("hi", word)} for word in ("yo", "a b c", "x")]


class Bad(NamedTuple):
    """A function that returns the task's keys, and all parts of the message."""

    lay: Callable[[Path], dict[str, Any]]
    expected_text: tuple[str, ...]


def rows(*made: Any, **keys: Any) -> Callable[[Path], dict[str, Any]]:
    """Use these rows with a valid model."""

    def lay(folder: Path) -> dict[str, Any]:
        return {
            "data": str(written(folder / "data", made)),
            "model": good(folder),
            "length": 64,
            **keys,
        }

    return lay


def chat(*messages: Any, **keys: Any) -> Callable[[Path], dict[str, Any]]:
    """Use a valid conversation, and then this one."""
    return rows(CHATS[0], {"messages": list(messages)}, **keys)


def good(folder: Path) -> str:
    return str(a_model(folder / "model", tokenizer_with(CHATML, PLAIN)))


def with_template(
    template: str | None, *special: str, data: Any = CHATS
) -> Callable[[Path], dict[str, Any]]:
    """Use a model whose tokenizer has this template."""

    def lay(folder: Path) -> dict[str, Any]:
        model = a_model(folder / "model", tokenizer_with(special or CHATML, template))
        return {"data": str(written(folder / "data", data)), "model": str(model), "length": 64}

    return lay


def with_file(text: str | None) -> Callable[[Path], dict[str, Any]]:
    """Use a file as the template."""

    def lay(folder: Path) -> dict[str, Any]:
        if text is not None:
            (folder / "mine.jinja").write_text(text)
        return rows(*CHATS, chat_template=str(folder / "mine.jinja"))(folder)

    return lay


def with_model(make: Callable[[int], Any], **keys: Any) -> Callable[[Path], dict[str, Any]]:
    """Use the model of ``make``, which gets the size of the tokenizer's vocabulary."""

    def lay(folder: Path) -> dict[str, Any]:
        given = rows(*CHATS, **keys)(folder)
        torch.manual_seed(0)
        make(len(tokenizer_with(CHATML, PLAIN))).save_pretrained(given["model"])
        return given

    return lay


def without_end(folder: Path) -> dict[str, Any]:
    tokenizer = tokenizer_with(CHATML, None)
    tokenizer.eos_token = None
    model = a_model(folder / "model", tokenizer)
    return {
        "data": str(written(folder / "data", [{"prompt": "a", "completion": "b"}] * 3)),
        "model": str(model),
    }


def mamba(entries: int) -> Any:
    sizes = {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 1}
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=entries, **sizes))


def gpt_neo(entries: int) -> Any:
    sizes = {
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
    }
    return transformers.GPTNeoForCausalLM(transformers.GPTNeoConfig(vocab_size=entries, **sizes))


def mixtral(entries: int) -> Any:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.MixtralConfig(
        vocab_size=entries, num_key_value_heads=2, num_local_experts=2, **sizes
    )
    config.router_aux_loss_coef = 0.02
    return transformers.MixtralForCausalLM(config)


def small_llama(entries: int) -> Any:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=entries - 7, **sizes))


def short_llama(entries: int) -> Any:
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(vocab_size=entries, max_position_embeddings=48, **sizes)
    return transformers.LlamaForCausalLM(config)


CHANGED = PLAIN.replace(
    "{{ m.content }}", "{% if loop.last %}<think></think>{% endif %}{{ m.content }}"
)
LONGER = [{"messages": turns("hi", "yo", "and", "so")} for _ in range(3)]
USER, IMAGE = {"role": "user", "content": "?"}, {"type": "image", "url": "a.png"}

# kind: (input, parts of the message)
BAD = {
    "a template that changes a turn when more follows": Bad(
        with_template(CHANGED, data=LONGER),
        (
            "train.jsonl, row 0",
            "cannot find the assistant's tokens of message 1",
            "{% generation %}",
            "--task.chat",
        ),
    ),
    "a template of TRL's that is changed": Bad(
        lambda folder: with_template("{#- mine #}" + of_trl("qwen3"), data=LONGER)(folder),
        (
            "train.jsonl, row 0",
            "cannot find the assistant's tokens of message 1",
            "--task.chat_template FILE",
        ),
    ),
    "no chat template": Bad(
        with_template(None), ("the tokenizer has no chat template", "--task.chat_template FILE")
    ),
    "a template file that is not there": Bad(
        with_file(None), ("task.chat_template", "mine.jinja", "cannot be read")
    ),
    "a template file that is no Jinja": Bad(
        with_file("{% for m in messages %}{{ m.content"),
        ("task.chat_template", "mine.jinja", "is not a Jinja template"),
    ),
    "a template that raises": Bad(
        with_file(PLAIN + "{{ raise_exception('only for birds') }}"),
        ("train.jsonl, row 0", "the chat template raised an error: only for birds"),
    ),
    "a template that ends no turn": Bad(
        with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
        (
            "train.jsonl, row 0",
            "no special token ends the answer",
            "end each turn with one (this tokenizer's is '<|im_end|>')",
            "--task.chat",
        ),
    ),
    "marks that leave out the end": Bad(
        with_template(
            "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content }}{% "
            "endgeneration %}<|im_end|>"
            "{% endfor %}"
        ),
        ("no special token ends the answer", "put it before {% endgeneration %}"),
    ),
    "an assistant without an answer": Bad(
        chat(USER, {"role": "assistant", "content": ""}),
        (
            "train.jsonl, row 1: message 1: the assistant's answer is empty",
            "fill it, or remove the row",
        ),
    ),
    "a role that is none": Bad(
        chat({"role": "human", "content": "?"}, {"role": "assistant", "content": "x"}),
        (
            "train.jsonl, row 1: message 0 has role 'human'",
            "expected one of system, developer, user, assistant, tool; rename it",
        ),
    ),
    "messages that are texts": Bad(
        rows(*[{"messages": ["hi", "yo"]}] * 3),
        ("train.jsonl, row 0: message 0 must have role and content, got 'hi'",),
    ),
    "no such columns": Bad(
        rows(*[{"text": "hi", "label": 1}] * 3),
        (
            "it has text, label; oneloop needs messages or prompt and completion",
            "cannot find 'messages' and 'prompt'; name other columns with task.messages",
        ),
    ),
    "a message without a role": Bad(
        chat({"content": "hi"}, {"role": "assistant", "content": "x"}),
        ("train.jsonl, row 1: message 0 has no role; it has content",),
    ),
    "a picture": Bad(
        rows(*[{"messages": [USER | {"content": [IMAGE]}, *turns("yo", first="assistant")]}] * 3),
        ("train.jsonl, row 0: message 0 holds more than text", "this task supports only text"),
    ),
    "no messages": Bad(chat(), ("train.jsonl, row 1: expected a list of messages, got []",)),
    "no conversation": Bad(
        rows(*[{"messages": None}] * 2, {"messages": turns("hi", "yo")}),
        ("train.jsonl, row 0: expected a list of messages, got nothing",),
    ),
    "tools that are none": Bad(
        rows(*[{**CHATS[0], "tools": "look"}] * 3),
        ("train.jsonl, row 0: the tools are 'look'; a list of JSON schemas is needed",),
    ),
    "an empty completion": Bad(
        rows({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}),
        ("train.jsonl, row 1: the completion is empty; fill it, or remove the row",),
    ),
    "texts and conversations": Bad(
        rows(
            {"prompt": "a", "completion": "b"},
            {"prompt": json.dumps([USER]), "completion": json.dumps([USER])},
        ),
        ("train.jsonl, row 1", "others are texts", "separate data sets"),
    ),
    "a tokenizer without an end": Bad(
        without_end, ("the tokenizer has no end token, so the model would not learn to stop",)
    ),
    "nothing to train": Bad(
        rows(*[{"messages": [USER]}] * 3),
        ("train: no token to train on in any of 3 texts within 64 tokens: no assistant message",),
    ),
    "answers behind the end": Bad(
        rows(*[{"messages": turns("q" * 200, "yo")}] * 3),
        ("no token to train on in any of 3 texts within 64 tokens",),
    ),
    "a model that is none": Bad(
        rows(*CHATS, model="llama"), ("task.model 'llama' is not a folder saved by transformers",)
    ),
    "more entries than the model has": Bad(
        with_model(small_llama), ("its tokenizer has 307 entries, and the model 300",)
    ),
    "longer than the model's positions": Bad(
        with_model(short_llama), ("task.length 64 exceeds the 48 positions of", "lower it")
    ),
    "a state space with packed documents": Bad(
        with_model(mamba), ("task.pack packed", "state", "use task.pack padded")
    ),
    "attention of its own with packed documents": Bad(
        with_model(gpt_neo),
        (
            "task.pack packed",
            "does not use transformers' attention interface",
            "use task.pack padded",
        ),
    ),
    "experts": Bad(
        with_model(mixtral),
        (
            "MixtralForCausalLM balances experts by an auxiliary loss",
            "router_aux_loss_coef 0.02",
            "set task.router_loss none",
        ),
    ),
}
TYPED = [
    "no chat template",
    "a template file that is not there",
    "an assistant without an answer",
    "no such columns",
    "nothing to train",
    "a state space with packed documents",
]


@pytest.mark.parametrize("name", [name for name in BAD if name not in TYPED])
def test_it_is_reported(tmp_path, name):
    given = BAD[name].lay(tmp_path)
    with pytest.raises(ValueError) as raised:
        SFT(**given).model()
    message = str(raised.value)
    assert all(word in message for word in BAD[name].expected_text), message
    assert "\n" not in message and len(message) < 700


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_it_is_reported_at_the_command_line(tmp_path, name):
    given = BAD[name].lay(tmp_path)
    words = [
        "digits",
        "--task",
        "sft",
        "--duration",
        "2",
        "--batch.size",
        "2",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    for key, value in given.items():
        words += [f"--task.{key}", str(value)]
    before = sorted(tmp_path.iterdir())
    world = run(train, words, folder=tmp_path)
    assert world.codes == [2] and all(word in world.output for word in BAD[name].expected_text), (
        world.output
    )
    assert "Traceback" not in world.output and len(world.output.splitlines()) <= 4, world.output
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (mixtral, {"router_loss": "none"}),
        (mamba, {"pack": "padded"}),
        (gpt_neo, {"pack": "padded"}),
    ],
)
def test_what_the_messages_advise_works(tmp_path, make, keys):
    task = SFT(**with_model(make, **keys)(tmp_path))
    model, mine = task.model(), task.train_set()
    batch = task.collate([mine[index] for index in range(len(mine))])
    total, _ = task.loss(model, batch)
    total.backward()
    assert torch.isfinite(total) and task.weight(batch) > 3


def test_what_a_template_leaves_out_is_not_an_answer(tmp_path):
    """Marks around the assistant's turns, which an error message advises, fix a template without
    marks."""
    marked = CHANGED.replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% "
        "endgeneration %}{% else %}"
        "{{ m.content }}<|im_end|>{% endif %}",
    )
    (tmp_path / "marked.jinja").write_text(marked)
    given = BAD["a template that changes a turn when more follows"].lay(tmp_path)
    task = SFT(**given, chat_template=str(tmp_path / "marked.jinja"), pack="padded")
    (document,) = task.train_set()[0].documents
    answers = [token for token in document.tolist() if token >= 0]
    assert task.decode(answers) == "yo<|im_end|>so<|im_end|>"


MORE = {
    "calls that are texts": (
        chat(USER, {"role": "assistant", "content": "x", "tool_calls": ["look"]}),
        "tool_calls",
    ),
    "a template that fails otherwise": (
        with_file(PLAIN + "{{ 1 // (messages | length - 2) }}"),
        "the chat template",
    ),
    "a message that is only said": (rows(*[{"messages": "hello"}] * 3), "got 'hello'"),
    "a number as a content": (
        chat(USER, {"role": "assistant", "content": {"text": "x"}}),
        "content",
    ),
    "a message without a content": (
        rows(*[{"messages": [{"from": "human"}, {"from": "gpt", "value": "x"}]}] * 3),
        "message 0 has no content",
    ),
}


@pytest.mark.parametrize("name", MORE)
def test_what_is_not_reported_yet(tmp_path, name):
    lay, expected_text = MORE[name]
    with pytest.raises(ValueError, match=expected_text):
        SFT(**lay(tmp_path))


@pytest.mark.parametrize("name", ["llama 3", "phi 3"])
@pytest.mark.parametrize("key", ["tool_calls", "reasoning_content"])
def test_what_a_template_does_not_write_is_reported(name, key):
    from oneloop.tasks.language.chat import Chat

    call = [{"type": "function", "function": {"name": "look", "arguments": {"n": 1}}}]
    answer = {"role": "assistant", "content": "", key: call if key == "tool_calls" else "thoughts"}
    expected = "does not write (the assistant's answer|tool_calls of assistant messages)"
    with pytest.raises(ValueError, match=expected):
        Chat(tokenizer_of(name)).encode([USER, answer])


@pytest.mark.slow
def test_rows_without_a_sample_are_skipped_if_asked_and_listed(tmp_path):
    silent = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    good_rows = [{"messages": turns(f"hi {n}", f"yo {n}")} for n in range(12)]
    bad_rows = [*good_rows[:3], {"messages": silent}, *good_rows[3:], {"messages": None}]
    keys = {"model": good(tmp_path), "length": 64, "pack": "padded", "held_out": 0.2}
    given = {"data": str(written(tmp_path / "bad", bad_rows, held=good_rows)), **keys}
    without = SFT(
        str(written(tmp_path / "good", good_rows, held=good_rows)), unreadable="skip", **keys
    )
    with pytest.raises(ValueError, match="row 3: message 1: the assistant's answer is empty"):
        SFT(**given)
    made = SFT(**given, unreadable="skip")
    sets = (made.train_set(), without.train_set())
    assert [one.tolist() for one in map(sets[0].__getitem__, range(12))] == [
        one.tolist() for one in map(sets[1].__getitem__, range(12))
    ]
    assert len(sets[0]) == 12 and [
        row.split("bad/")[1].split(":")[0] for row in made.skipped_rows
    ] == [
        "train.jsonl, row 3",
        "train.jsonl, row 13",
    ]
    assert "skipped" in sets[0].fingerprint() and "skipped" not in sets[1].fingerprint()
    with pytest.raises(ValueError, match="row 3: message 1"):
        made.samples_of(str(tmp_path / "bad" / "train.jsonl"), labelled=True)
    with pytest.raises(ValueError, match="row 0: message 1"):  # no row is left
        SFT(
            **given | {"data": str(written(tmp_path / "none", [{"messages": silent}] * 3))},
            unreadable="skip",
        )

    words = [
        "digits",
        "--task",
        "sft",
        "--duration",
        "2",
        "--batch.size",
        "4",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    for key, value in {**given, "unreadable": "skip"}.items():
        words += [f"--task.{key}", str(value)]
    world = run(train, words, ranks=2, config="ddp", folder=tmp_path)
    assert world.codes == [0, 0], world.output
    assert "2 rows were skipped and listed in environment.json" in world.output, world.output
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert about["skipped_rows"] == made.skipped_rows
