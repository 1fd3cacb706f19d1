"""What a chat template does not write: tool results, tools and calls are rejected, other texts are
counted, and texts that it writes in another form are neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chats import CHATML, FAMILIES, a_model, of_trl, tokenizer_with, turns, written
from oneloop.tasks.distil import Distil
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.conversations import conversation, encoded
from oneloop.tasks.preference import Preference
from oneloop.tasks.reward import Reward
from oneloop.tasks.rows.cached_arrays import make_row, ragged
from oneloop.tasks.sft import SFT

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.answer_rows",
    "oneloop.tasks.language.unwritten_texts",
    "oneloop.tasks.rows.cached_arrays",
)


def template(
    content: str = "{{ m['content'] or '' }}",
    *,
    calls: str = "",
    tools: str = "",
    only: str = "true",
) -> str:
    """Return a ChatML template of these parts, for messages for which ``only`` holds."""
    calls = f"{{% for c in m['tool_calls'] or [] %}}{calls}{{% endfor %}}"
    body = f"{content}{calls}{{{{ '<|im_end|>' }}}}"
    return (
        f"{{% if tools %}}{tools}{{% endif %}}{{% for m in messages %}}{{% if {only} %}}"
        "{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        f"{{% generation %}}{body}{{% endgeneration %}}{{% else %}}{body}{{% endif %}}"
        "{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


CALL = "<call>{{ c['function']['name'] }} {{ c['function']['arguments'] | tojson }}"
TOOLS = "{{ tools | tojson }}"
WHOLE = template(calls=CALL, tools=TOOLS)
SYSTEM = {"role": "system", "content": "speak French"}


def look(name: str = "weather", **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def with_tool(
    result: str = "42", answer: str = "it is 42", content: str = "", **more: Any
) -> list[dict[str, Any]]:
    """Return a conversation with a tool's result, which other messages repeat."""
    return [
        {"role": "user", "content": "the weather in Paris?"},
        {"role": "assistant", "content": content, "tool_calls": [look(city="Paris")]},
        {"role": "tool", "content": result, "tool_call_id": "c1", **more},
        {"role": "assistant", "content": answer},
    ]


SCHEMA = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'now, "é"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"name": "add", "description": "a sum", "parameters": {}},
]
TWO_CALLS = [
    *turns("the weather in Paris?"),
    {"role": "assistant", "content": "", "tool_calls": [look(city="Paris"), look("add", a=1)]},
]


def found(jinja: str, messages: Any, tools: Any = None) -> tuple[list[str], dict[str, Any]]:
    """Return the errors and the remarks of a conversation."""
    tokenizer = tokenizer_with(CHATML, jinja)
    chat = Chat(tokenizer)
    rows = [conversation(messages)]
    _, error, remarks = make_row(rows, lambda row: chat.encode(row, tools), 0)
    examples = {}
    for subject, (example, _) in remarks.items():
        what = subject.removeprefix("have ").removesuffix(" that the chat template does not write")
        examples[what] = example
    return [error] if error else [], examples


NO_TOOL = template(calls=CALL, tools=TOOLS, only="m['role'] != 'tool'")
RESULT = "the chat template does not write content of tool messages (number 2: "
CALLS = "the chat template does not write tool_calls of assistant messages (number 1: "
NO_TOOLS = "the chat template does not write the tools (number "
REJECTED: dict[str, tuple[str, Any, Any, str]] = {
    "a result": (NO_TOOL, with_tool("rain and wind"), None, RESULT),
    "a result that the answer repeats": (NO_TOOL, with_tool(), None, RESULT),
    "a result that the call holds": (NO_TOOL, with_tool("Paris"), None, RESULT),
    "a result that is the answer": (NO_TOOL, with_tool("it is 42"), None, RESULT),
    "a result whose turn is written": (
        template("{{ '' if m['role'] == 'tool' else m['content'] }}", calls=CALL),
        with_tool(),
        None,
        RESULT,
    ),
    "the second result": (
        template(calls=CALL, only="m['role'] != 'tool' or loop.previtem['role'] != 'tool'"),
        [*TWO_CALLS, *with_tool()[2:3], {"role": "tool", "content": "1"}, *turns("x", "ok")],
        None,
        RESULT.replace("2", "3"),
    ),
    "a result without calls": (
        NO_TOOL,
        [*turns("hi"), {"role": "tool", "content": "hi"}, *turns("hi", first="assistant")],
        None,
        RESULT.replace("2", "1"),
    ),
    "tools": (template(), turns("the weather? add?", "no"), SCHEMA, NO_TOOLS),
    "the second tool": (
        template(tools="{{ tools[0] | tojson }}"),
        turns("the weather?", "no"),
        SCHEMA,
        NO_TOOLS,
    ),
    "a schema without a name": (template(), turns("x", "no"), [{"type": "object"}], NO_TOOLS),
    "calls": (template(), with_tool(content="let me look"), None, CALLS),
    "the second call": (
        template(calls=f"{{% if loop.first %}}{CALL}{{% endif %}}"),
        [*TWO_CALLS, *with_tool()[2:]],
        None,
        CALLS,
    ),
    "arguments": (
        template(calls="<call>{{ c['function']['name'] }}"),
        with_tool(),
        None,
        CALLS,
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_without_it_an_answer_would_be_trained_without_its_context(name):
    jinja, messages, tools, expected = REJECTED[name]
    errors, remarks = found(jinja, messages, tools)
    assert [why[: len(expected)] for why in errors] == [expected] and not remarks
    assert found(WHOLE, messages, tools) == ([], {})


THOUGHTS = [
    *turns("one"),
    {"role": "assistant", "content": "two", "reasoning_content": "hm"},
    *turns("three"),
    {"role": "assistant", "content": "four", "thinking": "so", "reasoning_content": "so"},
]
LATE = template(
    "{% if loop.revindex0 == 1 and messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] + '\\n' }}{% endif %}{{ m['content'] }}",
    only="m['role'] != 'system'",
)
WRITTEN: dict[str, tuple[str, Any, Any]] = {
    "indented JSON": (template(calls=CALL, tools="{{ tools | tojson(indent=4) }}"), TWO_CALLS, 1),
    "tools as in Python": (template(calls=CALL, tools="{{ tools }}"), TWO_CALLS, 1),
    "a call as in Python": (
        template(
            calls="{{ c['function']['name'] }}({% for k, v in c['function']['arguments'].items() %}"
            "{{ k }}={{ v }},{% endfor %})",
            tools="{% for t in tools %}{{ (t['function'] or t)['name'] }}{% endfor %}",
        ),
        TWO_CALLS,
        1,
    ),
    "XML": (
        template(
            calls="<{{ c['function']['name'] | upper }}>{% for k, v in "
            "c['function']['arguments'].items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}",
            tools="{% for t in tools | reverse %}<{{ (t['function'] or t)['name'] | title }}>"
            "{% endfor %}",
        ),
        TWO_CALLS,
        1,
    ),
    "a result as JSON": (
        template(
            "{{ m['content'] | tojson if m['role'] == 'tool' else m['content'] }}", calls=CALL
        ),
        with_tool('{"t": "4\\u00b0", "é": ["x\\ny"]}'),
        None,
    ),
    "stripped contents": (template("{{ m['content'] | trim }}"), turns(" a \n", "\n b "), None),
    "capitals": (
        template("{{ m['content'] if m['role'] == 'assistant' else m['content'] | upper }}"),
        [SYSTEM, *turns("a", "b")],
        None,
    ),
    "a late system prompt": (LATE, [SYSTEM, *turns("a", "b")], None),
    "a tool's name": (WHOLE, with_tool(name="weather"), None),
    "a user's name": (
        template("{{ m['name'] or '' }} {{ m['content'] }}"),
        [{"role": "user", "content": "I", "name": "Bob"}, *turns("b", first="assistant")],
        None,
    ),
    "thoughts of the last turn": (
        template("{{ m['reasoning_content'] if loop.last else '' }}{{ m['content'] }}"),
        THOUGHTS,
        None,
    ),
    "thoughts in a content": (
        template("{{ m['content'].split('</think>')[-1] }}"),
        turns("a", "<think>hm</think>b", "c", "<think>so</think>d"),
        None,
    ),
    "flags and links": (
        template(),
        [
            {"role": "user", "content": "I", "id": "m-1", "weight": 0},
            *turns("b", first="assistant"),
        ],
        None,
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_texts_in_another_form_are_neither_rejected_nor_counted(name):
    jinja, messages, tools = WRITTEN[name]
    assert found(jinja, messages, SCHEMA if tools else None) == ([], {})


NO_SYSTEM = template(only="m['role'] != 'system'")
COUNTED: dict[str, tuple[str, Any, str, str]] = {
    "a system prompt": (NO_SYSTEM, [SYSTEM, *turns("a", "b")], "content of system", "speak French"),
    "a system prompt that the user repeats": (
        NO_SYSTEM,
        [SYSTEM, *turns("speak French, please", "oui")],
        "content of system",
        "speak French",
    ),
    "a later system prompt": (
        template(only="m['role'] != 'system' or loop.first"),
        [SYSTEM, *turns("a", "b"), {**SYSTEM, "content": "now German"}, *turns("c", "d")],
        "content of system",
        "now German",
    ),
    "a name": (
        template(),
        [{"role": "user", "content": "Bob here", "name": "Bob"}, *turns("b", first="assistant")],
        "name of user",
        "Bob",
    ),
    "another key": (
        template(),
        [{"role": "user", "content": "a", "context": "the page"}, *turns("b", first="assistant")],
        "context of user",
        "the page",
    ),
    "the first of two turns": (
        template(only="loop.last or m['role'] != loop.nextitem['role']"),
        [*turns("lost"), *turns("a", "b")],
        "content of user",
        "lost",
    ),
    "a content beside calls": (
        template("{{ '' if m['tool_calls'] else m['content'] }}", calls=CALL),
        with_tool(content="let me look"),
        "content of assistant",
        "let me look",
    ),
    "thoughts of the last turn": (template(), THOUGHTS, "thinking of assistant", "so"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_other_texts_are_counted_with_an_example(name):
    jinja, messages, subject, example = COUNTED[name]
    errors, remarks = found(jinja, messages)
    assert not errors
    assert remarks[f"{subject} messages"] == repr(example)
    assert len(remarks) == 1 + (name == "thoughts of the last turn")


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "ours"])
def test_templates_of_trl_write_system_prompts_and_long_conversations(name):
    family = FAMILIES[name]
    chat = Chat(tokenizer_with(family.special, of_trl(family.training), begin=family.begin))
    for messages in ([SYSTEM, *turns("a", "b", "c", "d")], turns("<|x|> ", "a\nb", "a", "a")):
        _, error, remarks = make_row([messages], chat.encode, 0)
        assert not error and not remarks


def test_a_long_text_is_shortened():
    _, remarks = found(NO_SYSTEM, [{**SYSTEM, "content": "x" * 99}, *turns("a", "b")])
    assert [*remarks.values()] == ["'xxxxxxxxxxxx...xxxxxxxxxxxxx'"]


# --- the tasks


def a_folder(tmp_path: Path, jinja: str, rows: list[Any]) -> dict[str, Any]:
    """Write rows and a model with this template; return keys of a task."""
    model = a_model(tmp_path / "model", tokenizer_with(CHATML, jinja))
    data = written(tmp_path / "data", rows, held=rows[:4])
    return {"data": str(data), "model": str(model), "length": 128, "pack": "padded"}


def test_a_line_counts_the_rows_also_from_the_cache_and_on_several_processes(tmp_path):
    rows = [{"messages": turns(f"q {n}", "a")} for n in range(24)]
    for row in rows[2::5]:  # 5 of the rows to train on, and 1 of those to evaluate
        row["messages"].insert(0, SYSTEM)
    given = a_folder(tmp_path, NO_SYSTEM, rows)
    line = (
        "rows have content of system messages that the chat template does not write (first: "
        f"{tmp_path}/data/train.jsonl, row 2: 'speak French')"
    )
    of_validation = line.replace("train", "validation")
    expected = [
        f"train: warning: 5 of 24 {line}",
        f"validation: warning: 1 of 4 {of_validation}",
    ]
    for _ in range(2):
        task = SFT(**given)
        assert [note for note in task.notes if "does not write" in note] == expected

    # Workers of a pool return the same.
    source = task.rows.sources[0]
    rows = source.parts["train"]
    encode, _ = task.rows._encoder(task.rows.encode, source, rows)
    notes = ragged(
        rows,
        encode,
        made_by="a test",
        what="a test",
        chunk=5,
    ).notes
    assert notes == [f"warning: 5 of 24 {line}"]


@pytest.mark.parametrize("kind", ["preference", "reward", "distil"])
def test_each_task_on_conversations_rejects_and_counts(tmp_path, kind):
    ask = [SYSTEM, *with_tool()[:3]]
    pairs = kind != "distil"

    def rows(before: list[Any]) -> list[dict[str, Any]]:
        if not pairs:
            return [{"messages": [*before, *turns("it is 42", first="assistant")]}] * 9
        right, wrong = (turns(text, first="assistant") for text in ("it is 42", "no"))
        return [{"prompt": before, "chosen": right, "rejected": wrong}] * 9

    # A tool's result is missing.
    given = a_folder(tmp_path / "tool", NO_TOOL, rows(ask))
    if kind == "reward":
        del given["pack"]
    if kind == "distil":
        given["teacher"] = given["model"]
    make: Any = {"preference": Preference, "reward": Reward, "distil": Distil}[kind]
    with pytest.raises(ValueError, match="row 0: .*content of tool messages .number 3: '42'"):
        make(**given)

    # A system prompt is missing.
    given |= {"data": str(written(tmp_path / "system", rows([SYSTEM, *turns("x")])))}
    (tmp_path / "mine.jinja").write_text(NO_SYSTEM)
    notes = make(**given, chat_template=str(tmp_path / "mine.jinja")).notes
    begin = "train: warning: 9 of 9 rows have content of system messages"
    assert any(note.startswith(begin) for note in notes)


def test_predict_rejects_a_prompt_whose_result_is_not_written():
    tokenizer = tokenizer_with(CHATML, NO_TOOL)
    columns = {"messages": "m", "prompt": "", "completion": "", "tools": "", "system": ""}
    with pytest.raises(ValueError, match="content of tool messages .number 2"):
        encoded({"m": with_tool()[:3]}, columns, tokenizer, Chat(tokenizer), labelled=False)


def test_tools_beside_a_prompt_that_is_a_text_are_rejected(tmp_path):
    rows = [{"prompt": f"q {n}", "completion": " a", "tools": SCHEMA} for n in range(9)]
    given = a_folder(tmp_path, WHOLE, rows)
    with pytest.raises(ValueError, match="'tools' has tools, and the prompt is a text"):
        SFT(**given)
    assert SFT(**given, tools="").train_set()


BEGUN = turns("what is it?", "Sure,")
ENDS = turns("it is 42", first="assistant")
PREFILL: dict[str, tuple[type, dict[str, Any]]] = {
    "sft": (SFT, {"prompt": BEGUN, "completion": ENDS}),
    "distil": (Distil, {"prompt": BEGUN, "completion": ENDS}),
    "preference": (Preference, {"prompt": BEGUN, "chosen": ENDS, "rejected": BEGUN[1:]}),
    "reward": (Reward, {"prompt": BEGUN, "chosen": ENDS, "rejected": BEGUN[1:]}),
    "whole conversations": (Preference, {"chosen": BEGUN + ENDS, "rejected": BEGUN + BEGUN[1:]}),
}


@pytest.mark.parametrize("name", PREFILL)
def test_a_prompt_that_ends_with_a_begun_answer_is_rejected(tmp_path, name):
    make, row = PREFILL[name]
    given: Any = a_folder(tmp_path, WHOLE, [row] * 9)
    if make is Reward:
        del given["pack"]
    if make is Distil:
        given["teacher"] = given["model"]
    expected = "the prompt ends with a message of the assistant .'Sure,'., and an answer follows"
    with pytest.raises(ValueError, match=f"row 0: .*{expected}; join a begun answer"):
        make(**given)


def test_prompts_that_end_with_a_call_or_before_another_question_are_trained(tmp_path):
    asks = with_tool()
    rows = [{"prompt": asks[:2], "completion": asks[2:]}] * 9
    rows += [{"prompt": turns("a", "b"), "completion": turns("c", "d")}] * 9
    assert len(SFT(**a_folder(tmp_path, WHOLE, rows)).train_set()) == 18
    # The last message of data to predict may be the answer.
    tokenizer = tokenizer_with(CHATML, WHOLE)
    columns = {"messages": "", "prompt": "m", "completion": "", "tools": "", "system": ""}
    tokens = encoded({"m": BEGUN}, columns, tokenizer, Chat(tokenizer), labelled=False)
    assert tokenizer.decode(tokens[tokens >= 0]) == "Sure,<|im_end|>"
