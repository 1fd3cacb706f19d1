"""Durations: ``500`` (steps), ``"20ep"``, ``"1M samples"``, ``"2B tokens"``, ``"10%"`` of a run."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from oneloop.basics.exit_codes import BadInput

_MULTIPLE = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
# units by the first two letters of the user's word; other words are times
_UNITS = {
    "": "steps",
    "st": "steps",
    "sa": "samples",
    "to": "tokens",
    "ep": "ep",
    "%": "%",
}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")
_FORM = re.compile(
    r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([KMB]?)\s*"
    r"(steps?|samples?|tokens?|ep|epochs?|%|s|min|h|d|)",
    re.ASCII,
)


class Duration:
    """A length of training as the user writes it.

    Raises ValueError if the text is not a duration.
    """

    def __init__(self, text: "str | int | Duration") -> None:
        self.text: str = text.text if isinstance(text, Duration) else str(text).strip()
        match = _FORM.fullmatch(self.text)
        if match is None:
            raise ValueError(
                f"{self.text!r} is not a duration; write steps (500), epochs ('20ep'), samples "
                "('1M samples'), tokens ('2B tokens') or a share ('10%'), never negative"
            )
        self.unit = _UNITS.get(match[3][:2], "seconds")
        # of the unit; exact, and in seconds for a time
        self.amount = Fraction(match[1]) * _MULTIPLE[match[2]]
        self.amount *= _SECONDS.get(match[3], 1)

    def steps(self, scale: "Scale", *, total: int | None = None, key: str = "duration") -> int:
        """Return whole steps, rounded up.

        Args:
            scale: sizes of one step and one epoch.
            total: steps of the run, which resolve ``%``.
            key: names the duration in messages.

        Raises:
            ValueError: if ``total`` is needed and unknown; for a time; or for tokens, if the
                samples differ in length.
        """
        return math.ceil(self.exact_steps(scale, total=total, key=key))

    def exact_steps(
        self, scale: "Scale", *, total: int | None = None, key: str = "duration"
    ) -> Fraction:
        """Return the steps, not rounded. Raise ValueError as :meth:`steps` does."""
        if self.unit == "steps":
            if self.amount.denominator != 1:
                raise ValueError(
                    f"{key} {self.text!r} is not a whole number of steps; add a unit ('2.5ep') "
                    "or round"
                )
            return self.amount
        if self.unit == "seconds":
            raise ValueError(
                f"{key} {self.text!r} is a time, which only save.every and stop.after accept; "
                "use steps"
            )

        # Samples, in any unit, are divided by those of a step.
        if self.unit in ("samples", "ep"):
            unit = scale.epoch if self.unit == "ep" else 1
            return self.amount * unit / scale.batch

        # A share of the run.
        if self.unit == "%":
            if total is None:
                raise ValueError(
                    f"{key} {self.text!r} is a share of the run, and the run's own length "
                    "cannot be one"
                )
            return self.amount * total / 100

        # Tokens.
        if scale.sample_tokens is None:
            raise ValueError(
                f"{key} {self.text!r} is in tokens, but this task's samples differ in length or "
                "are not tokens; use steps, 'ep' or 'samples'"
            )
        return self.amount / (scale.batch * Fraction(scale.sample_tokens))

    def samples(self, scale: "Scale", *, total: int | None = None, key: str = "duration") -> float:
        """Return the length in samples, not rounded. Raise ValueError as :meth:`steps` does."""
        return float(self.exact_steps(scale, total=total, key=key) * scale.batch)

    def __repr__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Duration):
            return False
        return (self.amount, self.unit) == (other.amount, other.unit)

    def __hash__(self) -> int:
        return hash((self.amount, self.unit))


@dataclass(frozen=True)
class Scale:
    """Sizes of one step and one epoch."""

    batch: int  # samples of one step, over all processes
    epoch: int  # samples of one epoch
    sample_tokens: float | None = None  # tokens per sample, if equal for all samples


def seconds(text: str, key: str) -> float:
    """Parse a time, as ``55min`` or ``3.5h``. Raise BadInput for anything else."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise BadInput(f"{key} {text!r} is not a time; write 90s, 55min, 3.5h or 2d")
    return float(match[1]) * _SECONDS[match[2]]


def is_time(step: int, every: int, total: int) -> bool:
    """Return True at every ``every``-th step and at the last step (0: only at the last step)."""
    return step == total or (every > 0 and step % every == 0)


def span(text: str, key: str) -> tuple[int, int]:
    """Parse ``"10-15"`` as (10, 15) and ``"10"`` as (10, 10).

    Raise BadInput for anything else.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    if match is not None:
        first = int(match[1])
        last = int(match[2] or match[1])
        if 1 <= first <= last:
            return first, last
    raise BadInput(f"{key} {text!r} is not a range of steps; write 10-15, counted from 1")
