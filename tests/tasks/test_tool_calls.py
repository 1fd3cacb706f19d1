"""Arguments of tool calls reach a template as objects, which it writes as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chats import CHATML, tokenizer_with, turns
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.conversations import conversation

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.chat",
    "oneloop.tasks.language.conversations",
)

HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') }}"
TAIL = (
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def loop(call: str) -> str:
    return f"{HEAD}{{% for c in m['tool_calls'] or [] %}}{call}{{% endfor %}}{TAIL}"


ARGUMENTS = "c['function']['arguments']"
NAMED = "'<call>' + c['function']['name'] + ' '"
AS_JSON = loop(f"{{{{ {NAMED} }}}}{{{{ {ARGUMENTS} | tojson }}}}")
WRITTEN = {
    "as JSON": AS_JSON,
    "either": loop(
        f"{{{{ {NAMED} }}}}{{% if {ARGUMENTS} is string %}}{{{{ {ARGUMENTS} }}}}"
        f"{{% else %}}{{{{ {ARGUMENTS} | tojson }}}}{{% endif %}}"
    ),
}
REJECTED = {
    # as DeepSeek R1 and V3
    "concatenated": (
        loop(f"{{{{ {NAMED} + {ARGUMENTS} }}}}"),
        "arguments of tool calls are objects: write them with the filter tojson",
    ),
    "printed": (
        loop(f"{{{{ {NAMED} }}}}{{{{ {ARGUMENTS} }}}}"),
        r"as Python and not as JSON \({'city': 'Paris'}\)",
    ),
    "left out": (loop(""), "does not write tool_calls of assistant messages .number 1"),
}


def messages_with(arguments: Any, content: str | None = None) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return conversation(
        [
            {"role": "user", "content": "weather"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "it rains"},
        ]
    )


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("arguments", [{"city": "Paris", "é": [1, None]}, {}])
def test_arguments_are_json_from_text_and_from_objects(name, arguments):
    tokenizer = tokenizer_with(CHATML, WRITTEN[name])
    chat = Chat(tokenizer)
    text = json.dumps(arguments, ensure_ascii=False)
    for given in (arguments, text, json.dumps(arguments, indent=1)):
        tokens = chat.encode(messages_with(given))
        answers = tokenizer.decode([int(token) for token in tokens if token >= 0])
        assert answers == f"<call>weather {text}<|im_end|>it rains<|im_end|>"


@pytest.mark.parametrize("name", REJECTED)
def test_a_call_that_is_not_written_as_json_is_rejected(name):
    template, expected_text = REJECTED[name]
    chat = Chat(tokenizer_with(CHATML, template))
    with pytest.raises(ValueError, match=expected_text):
        chat.encode(messages_with({"city": "Paris"}, "let me look"))
    assert len(chat.encode(turns("hello", "yo")))


def test_a_text_that_is_no_object_stays():
    tokenizer = tokenizer_with(CHATML, AS_JSON)
    for given in ("rain, please", "[1]"):
        tokens = Chat(tokenizer).encode(messages_with(given))
        written = tokenizer.decode([int(token) for token in tokens if token >= 0])
        assert written.startswith(f'<call>weather "{given}"<|im_end|>')
