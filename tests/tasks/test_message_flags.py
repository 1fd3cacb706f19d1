"""Messages that the data leave out of training, system prompts in a column, and tools."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from oneloop.basics.differences import differences
from oneloop.tasks.language.conversations import FLAGS
from oneloop.tasks.language.documents import token_ids
from oneloop.tasks.sft import SFT

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.conversations",
    "oneloop.tasks.language.messages_as_json",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.sft",
)

# Without marks, so that the answers are found by prefixes.
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BAD = "bad answer<|im_end|>"
GOOD = "good answer<|im_end|>"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", autouse=True)
def one_tokenizer():
    """Train the tokenizer of the models from scratch once; each task gets a copy of it."""
    train = SFT._new_tokenizer
    trained = {}

    def once(task: SFT, vocab: int) -> Any:
        if vocab not in trained:
            trained[vocab] = train(task, vocab)
        return copy.deepcopy(trained[vocab])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SFT, "_new_tokenizer", once)
        yield


def written(folder: Path, rows: list[dict[str, Any]], kind: str = "jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    else:
        (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def chats(*, sharegpt: bool = False, **bad: Any) -> list[dict[str, Any]]:
    """Return rows with a bad answer, which has these keys, and a good one."""
    rows = []
    for number in range(20):
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": f"a {number}"},
            {"role": "assistant", "content": "bad answer", **bad},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "good answer"},
        ]
        if sharegpt:
            names = {"user": "human", "assistant": "gpt"}
            messages = [
                {"from": names[one.pop("role")], "value": one.pop("content"), **one}
                for one in messages
            ]
        rows.append({"messages": messages})
    return rows


def task_of(folder: Path, *, marked: bool, **keys: Any) -> SFT:
    if not marked:
        (folder.parent / "plain.jinja").write_text(PLAIN)
        keys["chat_template"] = str(folder.parent / "plain.jinja")
    return SFT(data=str(folder), pack="padded", held_out=0.1, layers=1, heads=2, width=16, **keys)


def trained(task: SFT, index: int = 0) -> list[str]:
    """Return the trained texts of a sample."""
    texts, inside = [], False
    for token in map(int, task.train_set()[index].documents[0]):
        if token >= 0 and not inside:
            texts.append("")
        if token >= 0:
            texts[-1] += task.decode([token])
        inside = token >= 0
    return [text.strip() for text in texts]


ALL_VALUES = (("jsonl", 0), ("jsonl", False), ("parquet", 0), ("parquet", False))
SOME_VALUES = (("jsonl", False), ("parquet", 0))


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_message_is_left_out(tmp_path, flag, marked):
    # All flags are read in the same way: one of them has each value in each kind of file.
    values = ALL_VALUES if flag == FLAGS[0] else SOME_VALUES
    for kind, value in values:
        folder = written(tmp_path / f"{kind}-{value}", chats(**{flag: value}), kind)
        assert trained(task_of(folder, marked=marked)) == [GOOD]


@pytest.mark.parametrize("value", [1, True, None])
def test_a_message_that_is_trained_changes_nothing(tmp_path, value):
    plain = task_of(written(tmp_path / "plain", chats()), marked=True)
    flagged = task_of(written(tmp_path / "flagged", chats(weight=value)), marked=True)
    assert trained(flagged) == trained(plain) == [BAD, GOOD]


def test_flags_in_other_encodings(tmp_path):
    """JSON text in a column with a dictionary, and a key that is written with an escape."""
    rows = [{"messages": json.dumps(row["messages"])} for row in chats(weight=0)]
    (tmp_path / "dictionary").mkdir()
    table = pa.Table.from_pylist(rows)
    encoded = table.set_column(0, "messages", table["messages"].dictionary_encode())
    parquet.write_table(encoded, tmp_path / "dictionary" / "train.parquet")
    assert trained(task_of(tmp_path / "dictionary", marked=True)) == [GOOD]
    escaped = [{"messages": row["messages"].replace("weight", "weigh\\u0074")} for row in rows]
    assert trained(task_of(written(tmp_path / "escaped", escaped), marked=True)) == [GOOD]


def test_keys_of_arguments_are_no_flags(tmp_path):
    """A tool may have an argument of this name."""
    rows = chats()
    call = {"type": "function", "function": {"name": "f", "arguments": {"weight": 0.5}}}
    for row in rows:
        row["messages"][1]["tool_calls"] = [call]
    template = PLAIN.replace(
        "m['content'] }}",
        "m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% endfor %}",
    )
    (tmp_path / "calls.jinja").write_text(template)
    folder = written(tmp_path / "data", rows)
    task = task_of(folder, marked=True, chat_template=str(tmp_path / "calls.jinja"))
    assert len(trained(task)) == 2


def test_messages_that_are_no_list_are_named(tmp_path):
    rows = [{"messages": {"author": "user", "content": f"a {n}"}} for n in range(20)]
    with pytest.raises(ValueError, match="expected a list of messages"):
        task_of(written(tmp_path / "data", rows, "parquet"), marked=True)


def test_sharegpt_and_prompts_with_messages(tmp_path):
    folder = written(tmp_path / "sharegpt", chats(sharegpt=True, weight=0))
    assert trained(task_of(folder, marked=False)) == [GOOD]
    rows = [
        {"prompt": row["messages"][:1], "completion": row["messages"][1:]}
        for row in chats(train=False)
    ]
    for marked in (True, False):
        folder = written(tmp_path / f"prompts-{marked}", rows)
        assert trained(task_of(folder, marked=marked)) == [GOOD]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"weight": 0.5}, r"row 0: message 1: weight is 0\.5; expected 0, 1, false or true"),
        ({"loss": "no"}, r"message 1: loss is 'no'"),
        ({"train": 2}, r"message 1: train is 2"),
        ({"weight": 0, "train": True}, r"weight, train contradict each other"),
    ],
)
def test_other_values_are_rejected(tmp_path, bad, expected):
    folder = written(tmp_path / "data", chats(**bad))
    with pytest.raises(ValueError, match=expected):
        task_of(folder, marked=True)
    # Keys with another meaning can be ignored.
    assert trained(task_of(folder, marked=True, flags=[])) == [BAD, GOOD]


def test_only_answers_can_be_trained(tmp_path):
    rows = chats()
    for row in rows:
        row["messages"][0]["train"] = True
    with pytest.raises(ValueError, match="message 0 of 'user' has train true"):
        task_of(written(tmp_path / "data", rows), marked=True)


def test_other_flags_are_other_samples(tmp_path):
    """In the fingerprint, and in the cache of tokens."""
    folder = written(tmp_path / "flagged", chats(weight=0))
    flagged = task_of(folder, marked=True)
    ignored = task_of(folder, marked=True, flags=["train"])
    assert (trained(flagged), trained(ignored)) == ([GOOD], [BAD, GOOD])
    assert differences(flagged.train_set().fingerprint(), ignored.train_set().fingerprint())


def test_messages_of_a_prompt_have_no_flags(tmp_path):
    """They are not trained, and a prediction does not read them."""
    folder = written(tmp_path / "data", chats())
    task = task_of(folder, marked=True)
    prompt = [{"role": "user", "content": "a 1", "train": True}]
    rows = written(tmp_path / "prompts", [{"prompt": prompt} for _ in range(3)])
    assert len(task.samples_of(str(rows), labelled=False)) == 3


# --- the column of system prompts ---


def test_a_system_prompt_is_the_first_message(tmp_path):
    rows = [{**row, "system": "Be brief."} for row in chats(weight=0)]
    for marked in (True, False):
        task = task_of(written(tmp_path / f"{marked}", rows), marked=marked)
        sample = task.train_set()[0].documents[0]
        text = task.decode([int(token) if token >= 0 else int(~token) for token in sample])
        assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na ")
        assert trained(task) == [GOOD]
    without = task_of(tmp_path / "True", marked=True, system="")
    tokens = [abs(int(token)) for token in without.train_set()[0].documents[0]]
    assert "system" not in without.decode(tokens)


def test_rows_without_a_system_prompt(tmp_path):
    """None, an empty text, and the same prompt in both places."""
    for number, system in enumerate(("", None, "Be brief.")):
        rows = chats()
        for row in rows:
            row["system"] = system
            row["messages"].insert(0, {"role": "system", "content": "Be brief."})
        task = task_of(written(tmp_path / f"{number}", rows), marked=True)
        sample = token_ids(task.train_set()[0].documents[0])
        assert task.decode(sample.tolist()).count("<|im_start|>system") == 1


def test_system_prompts_that_contradict_or_have_no_place(tmp_path):
    rows = [{**row, "system": "Be brief."} for row in chats()]
    for row in rows:
        row["messages"].insert(0, {"role": "system", "content": "Be long."})
    with pytest.raises(ValueError, match="are different system prompts"):
        task_of(written(tmp_path / "both", rows), marked=True)
    texts = [{"prompt": f"q {n}", "completion": " a", "system": "Be brief."} for n in range(20)]
    with pytest.raises(ValueError, match="has a system prompt, and the prompt is a text"):
        task_of(written(tmp_path / "texts", texts), marked=True)
    assert task_of(tmp_path / "texts", marked=True, system="").train_set()


@pytest.mark.parametrize("without", ["train", "validation", "test"])
def test_an_optional_column_of_some_files_only_is_named(tmp_path, without):
    for name in ("train", "validation", "test"):
        more = {} if name == without else {"system": "Be brief."}
        text = "".join(json.dumps({**row, **more}) + "\n" for row in chats())
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{name}.jsonl").write_text(text)
    with pytest.raises(ValueError, match="only some files have the column 'system'"):
        task_of(tmp_path / "data", marked=True)
    task = task_of(tmp_path / "data", marked=True, system="")
    assert list(task.eval_sets()) == ["validation", "test"]


@pytest.mark.parametrize("system", [{"os": "x"}, 3, ["a"]])
def test_a_column_with_another_meaning_is_named(tmp_path, system):
    folder = written(tmp_path / "data", [{**row, "system": system} for row in chats()])
    with pytest.raises(ValueError, match="'system' holds .*; expected text of system prompts"):
        task_of(folder, marked=True)
    assert trained(task_of(folder, marked=True, system="")) == [BAD, GOOD]


# --- tools ---


def test_no_tools_in_any_form(tmp_path):
    expected = None
    for number, tools in enumerate((None, [], "[]", " [ ] ", "null", "{}", "")):
        rows = [{**row, "tools": tools} for row in chats()]
        task = task_of(written(tmp_path / f"{number}", rows), marked=True)
        sample = task.train_set()[0].documents[0].tolist()
        expected = expected or sample
        assert sample == expected
