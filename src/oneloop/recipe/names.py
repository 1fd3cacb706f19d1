"""Short names, and the classes and functions that they stand for."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from oneloop.basics.errors import BadInput

CHOICES: dict[str, dict[str, str]] = {
    "task": {
        "image_classification": "oneloop.tasks.image_classification.ImageClassification",
        "causal_lm": "oneloop.tasks.causal_lm.CausalLM",
        "text_classification": "oneloop.tasks.text_classification.TextClassification",
        "text_regression": "oneloop.tasks.text_regression.TextRegression",
        "token_classification": "oneloop.tasks.token_classification.TokenClassification",
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
    if module.partition(".")[0] in sys.stdlib_module_names:
        raise BadInput(f"{group}.name {name!r} is of Python's standard library, where {_WANTED[group]} cannot be")
    try:
        chosen = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{group}.name {name!r} needs the module {error.name!r}, which is not installed and not found from this"
            f" folder; install it or correct the path{_extra(error.name)}"
        ) from error
    except AttributeError:
        raise BadInput(f"{group}.name {name!r}: the module {module!r} has no {attribute!r}") from None
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(
            f"{group}.name {name!r}: importing {module!r} failed: {type(error).__name__}: {error}"
        ) from error
    if wrong := "" if name in known else _FITS[group](chosen):
        raise BadInput(f"{group}.name {name!r} {wrong}; {_WANTED[group]} is needed")
    return chosen  # type: ignore[no-any-return]


def source(group: str, name: str) -> Path | None:
    """The file or folder that the module of ``name`` would be imported from; None for a short name. Imports nothing."""
    if name in CHOICES[group]:
        return None
    top = name.partition(".")[0]
    try:
        found = find_spec(top)
    except (ImportError, ValueError):
        found = None
    return Path(found.origin) if found is not None and found.origin else None


def _task_like(chosen: Any) -> str:
    """Why it is no task, as far as its class tells; some members may be set by ``__init__``."""
    members = ("model", "train_set", "eval_sets", "collate", "weight", "loss")
    if not isinstance(chosen, type):
        return f"is a {type(chosen).__name__}, not a class"
    lacks = [member for member in members if not callable(getattr(chosen, member, None))]
    return f"is a class that lacks {', '.join(lacks)}" if len(lacks) > 3 else ""


def _optimizer_like(chosen: Any) -> str:
    """Why it makes no optimizer."""
    if isinstance(chosen, type):
        parents = [f"{parent.__module__}.{parent.__name__}" for parent in chosen.__mro__]
        return "" if "torch.optim.optimizer.Optimizer" in parents else "is a class that is no torch.optim.Optimizer"
    takes = _parameters(chosen)
    if takes is None:
        return f"is a {type(chosen).__name__}, neither a class nor a function"
    fits = {"params", "lr"} <= takes.keys()
    return "" if fits else f"is a function of ({', '.join(takes)}), and not of (params, *, lr, …)"


def _schedule_like(chosen: Any) -> str:
    """Why it is no schedule."""
    takes = _parameters(chosen)
    if takes is None:
        return f"is a {type(chosen).__name__}, not a function"
    needed = [
        parameter
        for parameter in takes.values()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    return "" if len(needed) == 2 else f"is a function of ({', '.join(takes)}), and not of two arguments"


def _parameters(chosen: Any) -> Mapping[str, inspect.Parameter] | None:
    return inspect.signature(chosen).parameters if inspect.isfunction(chosen) else None


_FITS: dict[str, Callable[[Any], str]] = {
    "task": _task_like,
    "optimizer": _optimizer_like,
    "schedule": _schedule_like,
}
"""what is looked at before a thing that a name leads to is called: it may be any function of any package"""
_WANTED = {
    "task": "a class with the members of oneloop.tasks.base.Task",
    "optimizer": "a torch.optim.Optimizer, or a function (params, *, lr, …) that makes one,",
    "schedule": "a function (step, total) -> factor",
}


def _extra(module: str | None) -> str:
    return " (pip install 'oneloop[recipes]')" if module in {"sklearn", "torchvision", "transformers"} else ""


def suggestion(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
