"""Exit codes of a run, and the exceptions that lead to them."""

DONE = 0
ERROR = 1
BAD_INPUT = 2
DIVERGED = 3
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: start the same command again to resume
INTERRUPTED = 130  # 128 + SIGINT, as in a shell


class BadInput(ValueError):
    """Invalid input: the message states the request, what was found, and what to do."""

    code = BAD_INPUT  # the exit code of a process that ends with this error
    shared = False  # whether all ranks raise it


class Unavailable(OSError):
    """Storage fails now, and may answer later: exit code 1, so that schedulers start again."""

    code = ERROR
    shared = False  # whether all ranks raise it


class StoppedEarly(BaseException):
    """A signal requested a stop before the run had begun."""


class Diverged(RuntimeError):
    """The loss or gradient became NaN or Inf, or spiked.

    The weights are those from before that step.
    """


class Inexact(RuntimeError):
    """The result of a step would depend on the parallel layout.

    The step was not accepted or saved.

    Args:
        message: what was found.
        equal_at: the last step that was found to be right; a later one may be wrong. None: the step
            before this one.
    """

    def __init__(self, message: str, *, equal_at: int | None = None) -> None:
        super().__init__(message)
        self.equal_at = equal_at
