"""What a bad step is, and what is done about it."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Literal

Action = Literal["stop", "skip", "rewind"]


class Verdict(enum.Enum):
    """What became of a step."""

    TAKEN = 0
    NONFINITE = 1
    """its gradient was NaN or Inf; nothing was changed"""
    SPIKE = 2
    """its loss or gradient norm was too far above those before; nothing was changed"""
    RESCALED = 3
    """fp16: the loss scale was too large and is smaller now; nothing was changed"""


class Fate(enum.Enum):
    """What a run has made of a step."""

    TAKEN = enum.auto()
    SKIPPED = enum.auto()
    """left out: the next step takes its number"""
    REWOUND = enum.auto()
    """all is as it was at the last checkpoint, but for the samples since, which are passed over"""


@dataclass(frozen=True)
class Policy:
    """What is done about a bad step."""

    nonfinite: Action = "stop"
    spike: Action = "skip"
    sigma: float = 0.0
    """a spike is a loss or gradient norm that many standard deviations above the mean of the window (0: none is)"""
    window: int = 100
    """steps that mean and standard deviation are taken over; nothing is a spike before there are as many"""

    def action(self, verdict: Verdict) -> Action:
        return self.spike if verdict is Verdict.SPIKE else self.nonfinite

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
        patience: bad steps in a row that do not end the run. A step that is taken ends a row of skipped ones; only a
            checkpoint ends a row of rewinds, since the steps before the bad one are taken again and again.
    """

    def __init__(self, policy: Policy, patience: int) -> None:
        self.policy, self.patience = policy, patience
        self._in_a_row: Counter[Action] = Counter()

    def taken(self) -> None:
        """A step was taken."""
        self._in_a_row["skip"] = 0

    def saved(self) -> None:
        """A checkpoint was made."""
        self._in_a_row.clear()

    def answer(self, verdict: Verdict) -> tuple[Action, str]:
        """What to do about one more bad step, and why, in words."""
        action = self.policy.action(verdict)
        self._in_a_row[action] += 1
        why = {
            Verdict.NONFINITE: "the gradient is not finite",
            Verdict.SPIKE: f"loss or gradient norm is {self.policy.sigma:g} deviations above those before",
        }[verdict]
        if self._in_a_row[action] > self.patience:
            why += f", and these are {self._in_a_row[action]} bad steps in a row (guard.patience {self.patience})"
            return "stop", why
        return action, why
