"""How a run ends: the exit codes, and the exceptions that lead to them."""

import math

DONE = 0
ERROR = 1
BAD_INPUT = 2
DIVERGED = 3
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again to go on


class BadInput(ValueError):
    """What the user asked for cannot be done: the message says what was asked, what was found and what to do."""


class StoppedEarly(BaseException):
    """A signal asked for a stop before the run had begun."""


class Diverged(RuntimeError):
    """Loss or gradient became NaN or Inf; the weights are those from before that step."""


class Inexact(RuntimeError):
    """A step whose result would depend on the parallel layout; it was not accepted, and no checkpoint holds it."""


def at_least(bound: float, **values: float) -> None:
    """Rejects values below ``bound``; their names are keys of the recipe, with two underscores for the dot.

    Raises:
        BadInput: one is smaller, infinite or NaN.
    """
    for key, value in values.items():
        if not bound <= value < math.inf:
            raise BadInput(f"{key.replace('__', '.')} must be at least {bound}, and finite; got {value}")


def within(bound: float, most: float, **values: float) -> None:
    """Rejects values outside of ``bound`` to ``most``, as :func:`at_least` does.

    Raises:
        BadInput: one is smaller, larger or NaN.
    """
    for key, value in values.items():
        if not bound <= value <= most:
            raise BadInput(f"{key.replace('__', '.')} must be from {bound} to {most}, got {value}")
