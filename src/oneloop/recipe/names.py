"""Short names, and the classes and functions that they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from oneloop.basics.errors import BadInput

CHOICES: dict[str, dict[str, str]] = {
    "task": {
        "image_classification": "oneloop.tasks.image_classification.ImageClassification",
        "causal_lm": "oneloop.tasks.causal_lm.CausalLM",
        "text_classification": "oneloop.tasks.text_classification.TextClassification",
    },
    "optimizer": {name: f"oneloop.optim.build.{name}" for name in ("adamw", "sgd", "muon", "adafactor")},
    "schedule": {name: f"oneloop.optim.schedule.{name}" for name in ("constant", "linear", "cosine", "wsd", "plateau")},
}
"""what stands behind ``task.name``, ``optimizer.name`` and ``schedule.name``, by group"""


def resolve(group: str, name: str) -> Callable[..., Any]:
    """The class or function that ``name`` stands for: a short name of the group, or a dotted path.

    Raises:
        BadInput: there is no such thing.
    """
    known = CHOICES[group]
    path = known.get(name, name)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise BadInput(
            f"{group}.name {name!r} is none of {', '.join(known)}, nor the path of one of your own"
            f" (module.Name){suggestion(name, known)}"
        )
    try:
        chosen = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{group}.name {name!r} needs the module {error.name!r}, which is not installed and not found from this"
            f" folder; install it or correct the path{_extra(error.name)}"
        ) from error
    except AttributeError:
        raise BadInput(f"{group}.name {name!r}: the module {module!r} has no {attribute!r}") from None
    if not callable(chosen):
        raise BadInput(f"{group}.name {name!r} is a {type(chosen).__name__}, not a class or function")
    return chosen  # type: ignore[no-any-return]


def _extra(module: str | None) -> str:
    return " (pip install 'oneloop[recipes]')" if module in {"sklearn", "torchvision", "transformers"} else ""


def suggestion(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
