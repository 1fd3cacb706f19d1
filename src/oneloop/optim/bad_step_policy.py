"""The policy for bad steps: what the run does after a step that did not change the weights."""

import enum
from collections import Counter
from typing import Literal

Action = Literal["stop", "skip", "rewind"]


class Fault(enum.Enum):
    """Why a step did not change the weights."""

    NONE = 0  # the step is accepted
    NONFINITE = 1  # the gradient was NaN or Inf
    SPIKE = 2  # the loss or the gradient norm was too far above the previous ones
    RESCALED = 3  # fp16: the loss scale was too large and was lowered


class Outcome(enum.Enum):
    """Result of a step for the run."""

    ACCEPTED = enum.auto()
    SKIPPED = enum.auto()  # dropped: the next step takes its number
    REWOUND = enum.auto()  # the last checkpoint was restored; the samples since are not trained on


class BadSteps:
    """Chooses the action for each bad step, and counts bad steps in a row.

    An accepted step resets the count of skips. Only a checkpoint resets the count of rewinds, since
    each rewind repeats accepted steps.

    Args:
        nonfinite: action if the gradient is not finite. A spike is always skipped.
        patience: bad steps in a row that do not end the run.
    """

    def __init__(self, nonfinite: Action, patience: int) -> None:
        self.nonfinite = nonfinite
        self.patience = patience
        self._in_a_row: Counter[Action] = Counter()

    def accepted(self) -> None:
        """Record that a step was accepted."""
        self._in_a_row["skip"] = 0

    def saved(self) -> None:
        """Record that a checkpoint was saved."""
        self._in_a_row.clear()

    def answer(self, fault: Fault) -> tuple[Action, str]:
        """Count one more bad step; return the action, and the reason as text."""
        action = self.nonfinite
        why = "the gradient is not finite"
        if fault is Fault.SPIKE:
            action = "skip"
            why = "loss or gradient norm is guard.sigma deviations above those before"

        # Too many in a row end the run.
        self._in_a_row[action] += 1
        if self._in_a_row[action] > self.patience:
            why += (
                f", and these are {self._in_a_row[action]} bad steps in a row (guard.patience "
                f"{self.patience})"
            )
            return "stop", why
        return action, why
