"""What the components of a run look like in a checkpoint, whose files may come from elsewhere."""

from typing import Any

from oneloop.basics.untrusted import (
    HEX16,
    STEP,
    Form,
    is_amount,
    is_number,
    is_number_or_none,
)

TASK = "task"  # name of the task's state in a checkpoint, and of task.json in ``final/``

_CONTENT = {"length": STEP, "content?": dict | None, "checksum?": str | None}
IDENTITY = {
    "data": {None: _CONTENT},
    "model": str,
    "trained": str,
    "precision": str,
    "rates": [is_number],
    "source": {"file?": str, "checksum?": HEX16},
    "follows": int | None,
    "recipe": {None: object},
    "device": str,
    "computed": dict | None,
    "order": {"position": STEP, "hash": str | None},
}
EMA = {"seen": is_amount, "due": is_amount, "updates": STEP, "calls": STEP}
FORMS: dict[str, Form] = {
    "counters": {
        "position": STEP,
        "step": STEP,
        "samples": STEP,
        "weight": is_amount,
        "reductions": STEP,
        "waited": STEP,
        "seconds": is_amount,
        "evaluation_due": bool,
        "lost": {None: is_number},
    },
    "best": {
        "metric": str,
        "upward": bool,
        "value": is_number_or_none,
        "step": STEP,
        "since": STEP,
    },
    "meter": {
        "losses?": [is_number],
        "figures?": [[is_number]],
        "leaves?": [[is_number]],
        "weight?": is_number,
    },
    "results": {None: is_number},
    "noise": {"found": [(is_number, is_number)]},
    "guard": {"values?": [[is_number]], "count?": STEP},
    "identity": IDENTITY,
    "draws": {"drawn": bool},
    "tracking": {"bytes": STEP, "step": STEP, "xxh3": HEX16},
    "scaler": {None: is_number},
}


def forms_with(emas: list[str]) -> dict[str, Any]:
    """Return the forms of all components, also of EMAs of these names."""
    return FORMS | dict.fromkeys(emas, EMA)
