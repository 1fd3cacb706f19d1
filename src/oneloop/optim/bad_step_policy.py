"""What a bad step is, and what is done about it."""

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Action = Literal["stop", "skip", "rewind"]


class Fault(enum.Enum):
    """Why a step changed nothing."""

    NONE = 0
    """the step is accepted"""
    NONFINITE = 1
    """the gradient was NaN or Inf"""
    SPIKE = 2
    """the loss or the gradient norm was too far above the previous ones"""
    RESCALED = 3
    """fp16: the loss scale was too large and was lowered"""


class Outcome(enum.Enum):
    """Result of a step for the run."""

    ACCEPTED = enum.auto()
    SKIPPED = enum.auto()
    """dropped: the next step takes its number"""
    REWOUND = enum.auto()
    """the last checkpoint was restored; the samples since are not trained on"""


@dataclass(frozen=True)
class Policy:
    """What is done about a bad step."""

    nonfinite: Action = "stop"
    spike: Action = "skip"
    sigma: float = 0.0
    """a spike is a loss or gradient norm that many standard deviations above the mean of the window (0: none is)"""
    window: int = 100
    """steps that mean and standard deviation are taken over; nothing is a spike before there are as many"""

    def action(self, fault: Fault) -> Action:
        return self.spike if fault is Fault.SPIKE else self.nonfinite

    @property
    def goes_on(self) -> bool:
        """Whether the run may go on after a bad step."""
        return self.nonfinite != "stop" or (self.sigma > 0 and self.spike != "stop")

    @property
    def rewinds(self) -> bool:
        return self.nonfinite == "rewind" or (self.sigma > 0 and self.spike == "rewind")


class BadSteps:
    """What is done about bad steps, and how many of them came in a row.

    Args:
        policy: what a bad step is answered with.
        patience: bad steps in a row that do not end the run. An accepted step ends a row of skipped ones; only a
            checkpoint ends a row of rewinds, since the steps before the bad one are repeated each time.
    """

    def __init__(self, policy: Policy, patience: int) -> None:
        self.policy, self.patience = policy, patience
        self._in_a_row: Counter[Action] = Counter()

    def accepted(self) -> None:
        """A step was accepted."""
        self._in_a_row["skip"] = 0

    def saved(self) -> None:
        """A checkpoint was made."""
        self._in_a_row.clear()

    def answer(self, fault: Fault) -> tuple[Action, str]:
        """What to do about one more bad step, and why, in words."""
        action = self.policy.action(fault)
        self._in_a_row[action] += 1
        spike = f"loss or gradient norm is {self.policy.sigma:g} deviations above those before"
        why = spike if fault is Fault.SPIKE else "the gradient is not finite"
        if self._in_a_row[action] > self.patience:
            why += f", and these are {self._in_a_row[action]} bad steps in a row (guard.patience {self.patience})"
            return "stop", why
        return action, why
