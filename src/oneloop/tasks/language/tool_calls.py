"""Tool calls in the form that a chat template needs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

_ARGUMENTS = {"probed": "yes"}
_PROBE: list[dict[str, Any]] = [
    {"role": "user", "content": "question"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call00001",
                "type": "function",
                "function": {"name": "probe", "arguments": _ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "result"},
    {"role": "assistant", "content": "answer"},
]


@dataclass(frozen=True)
class CallForm:
    """How a template needs messages with tool calls.

    Args:
        as_text: arguments are JSON text, and not objects.
        no_content: the content of a message without text is None, and not an empty text.
    """

    as_text: bool = False
    no_content: bool = False

    def converted(self, messages: Sequence[Any]) -> list[Any]:
        """Return the messages with their tool calls in this form."""
        return [self._converted(message) for message in messages]

    def _converted(self, message: Any) -> Any:
        if not message.get("tool_calls"):
            return message
        calls = [self._call(call) for call in message["tool_calls"]]
        content = message.get("content")
        if self.no_content and not content:
            content = None
        return {**message, "content": content, "tool_calls": calls}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function")
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if self.as_text == isinstance(arguments, str):
            return call
        if self.as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        else:
            # Parse a JSON object; other texts stay.
            try:
                arguments = json.loads(arguments)
            except ValueError:
                return call
            if not isinstance(arguments, dict):
                return call
        return {**call, "function": {**function, "arguments": arguments}}


def call_form(render: Callable[[Sequence[Any]], str]) -> CallForm:
    """Return the form that a template writes as JSON; objects and texts if it writes none.

    DeepSeek's templates concatenate the arguments, and some need a content of None.

    Args:
        render: renders messages, or raises ValueError.
    """
    for flags in product((False, True), repeat=2):
        form = CallForm(*flags)
        try:
            text = render(form.converted(_PROBE))
        except ValueError:
            continue
        # Python's notation has other quotes, and a text that is encoded twice has backslashes.
        if '"probed"' in text:
            return form
    return CallForm()
