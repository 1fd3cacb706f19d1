"""The training configuration of a recipe, as one flat dict that a resume compares."""

import re
from collections.abc import Mapping
from typing import Any

from oneloop.basics.differences import Texts
from oneloop.basics.duration import Duration
from oneloop.basics.files import flattened
from oneloop.recipe.class_paths import CHOICES

_TRAINED = re.compile(
    r"(task|init|data|optimizer|schedule|ema|guard)\..*|seed|duration|batch\.(size|grain)"
    r"|debug\.overfit"
)
_NOT_TRAINED = ("ema.device", "task.store")
_DATA = "task.data"
PATH = "path of the data"
_NAMES = tuple(f"{group}.name" for group in CHOICES)
# last parts of the names of schedules without an end
_ENDLESS = (
    "constant",
    "plateau",
    "StepLR",
    "MultiStepLR",
    "ExponentialLR",
    "ConstantLR",
    "LinearLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
)


def is_training_key(key: str) -> bool:
    """Return whether a key of a recipe decides what is trained."""
    return key not in _NOT_TRAINED and _TRAINED.fullmatch(key) is not None


def training_configuration(resolved: Mapping[str, Any]) -> Texts:
    """Return the keys of a resolved recipe that decide what is trained, with texts.

    The paths in ``task.data``, which may change, have another name than the shares, names and
    columns of a mixture.
    """
    configuration: Texts = {}
    for key, value in flattened(resolved).items():
        # A class may be named in several ways: my_task.py:T in any folder is my_task.T.
        if key in _NAMES:
            value = value.rpartition("/")[2].replace(".py:", ".")
        if key == _DATA:
            configuration[PATH] = str(value)
            value = _without_paths(value)
        if is_training_key(key):
            configuration[key] = str(value)
    return configuration


def _without_paths(data: Any) -> Any:
    if not isinstance(data, list):
        return None
    return [{key: value for key, value in item.items() if key != "data"} for item in data]


def only_extends(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether the duration of one configuration may be extended to that of another.

    The new one must be longer, and schedule and EMA must not depend on it.
    """
    endless = now["schedule.name"].rpartition(".")[2] in _ENDLESS
    has_end = not endless and now.get("schedule.length") == "None"
    groups = ("schedule.", "ema.")
    shares = [key for key, text in now.items() if key.startswith(groups) and "%" in text]
    old = Duration(before["duration"])
    new = Duration(now["duration"])
    return not (has_end or shares) and old.unit == new.unit and new.amount > old.amount
