"""Tool calls reach each template in the form that it writes as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chats import CHATML, tokenizer_with, turns
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.conversations import conversation
from oneloop.tasks.language.tool_calls import CallForm

pytestmark = pytest.mark.covers(
    "oneloop.tasks.language.chat",
    "oneloop.tasks.language.conversations",
    "oneloop.tasks.language.tool_calls",
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
# as DeepSeek R1 and V3: arguments are concatenated, and a call needs a content of None
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{{ '<|im_start|>assistant\\n' }}{% for c in m['tool_calls'] %}"
    "{{ '<call>' + c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "concatenated": (loop(f"{{{{ {NAMED} + {ARGUMENTS} }}}}"), CallForm(as_text=True)),
    "printed": (loop(f"{{{{ {NAMED} }}}}{{{{ {ARGUMENTS} }}}}"), CallForm(as_text=True)),
    "as JSON": (loop(f"{{{{ {NAMED} }}}}{{{{ {ARGUMENTS} | tojson }}}}"), CallForm()),
    "either": (
        loop(
            f"{{{{ {NAMED} }}}}{{% if {ARGUMENTS} is string %}}{{{{ {ARGUMENTS} }}}}"
            f"{{% else %}}{{{{ {ARGUMENTS} | tojson }}}}{{% endif %}}"
        ),
        CallForm(),
    ),
    "DeepSeek": (DEEPSEEK, CallForm(as_text=True, no_content=True)),
    "none": (loop(""), CallForm()),
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


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "none"])
@pytest.mark.parametrize("arguments", [{"city": "Paris", "é": [1, None]}, {}])
def test_arguments_are_json_from_text_and_from_objects(name, arguments):
    template, form = TEMPLATES[name]
    tokenizer = tokenizer_with(CHATML, template)
    chat = Chat(tokenizer)
    assert chat.call_form == form
    text = json.dumps(arguments, ensure_ascii=False)
    for given in (arguments, text):
        tokens = chat.encode(messages_with(given))
        answers = tokenizer.decode([int(token) for token in tokens if token >= 0])
        assert answers == f"<call>weather {text}<|im_end|>it rains<|im_end|>"


def test_a_text_of_the_user_is_kept_as_it_is():
    tokenizer = tokenizer_with(CHATML, TEMPLATES["concatenated"][0])
    given = '{"b":1,  "a" : 2}'
    tokens = Chat(tokenizer).encode(messages_with(given))
    assert given in tokenizer.decode([int(token) for token in tokens if token >= 0])


def test_a_call_that_is_not_written_is_rejected():
    chat = Chat(tokenizer_with(CHATML, TEMPLATES["none"][0]))
    with pytest.raises(
        ValueError, match="does not write tool_calls of assistant messages .number 1"
    ):
        chat.encode(messages_with({"city": "Paris"}, "let me look"))
    assert len(chat.encode(turns("hello", "yo")))
