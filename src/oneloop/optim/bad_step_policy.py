"""The policy for bad steps: which steps are bad, and what the run does then."""

import enum
from collections import Counter
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Policy:
    """Which steps are bad, and what follows. The step of a spike is always skipped."""

    nonfinite: Action = "stop"
    """action if the gradient is not finite"""
    sigma: float = 0.0
    """threshold of a spike: standard deviations of loss or gradient norm above the mean of the
    last 100 steps (0: off)"""

    @property
    def rewinds(self) -> bool:
        """Whether a bad step may restore the last checkpoint."""
        return self.nonfinite == "rewind"


class BadSteps:
    """Chooses the action for each bad step, and counts bad steps in a row.

    An accepted step resets the count of skips. Only a checkpoint resets the count of rewinds, since
    each rewind repeats accepted steps.

    Args:
        policy: defines the actions.
        patience: bad steps in a row that do not end the run.
    """

    def __init__(self, policy: Policy, patience: int) -> None:
        self.policy = policy
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
        action = self.policy.nonfinite
        why = "the gradient is not finite"
        if fault is Fault.SPIKE:
            action = "skip"
            why = f"loss or gradient norm is {self.policy.sigma:g} deviations above those before"

        # Too many in a row end the run.
        self._in_a_row[action] += 1
        if self._in_a_row[action] > self.patience:
            why += (
                f", and these are {self._in_a_row[action]} bad steps in a row (guard.patience "
                f"{self.patience})"
            )
            return "stop", why
        return action, why
