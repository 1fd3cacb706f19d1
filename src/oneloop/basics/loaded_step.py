"""The step for which this process is loading samples."""

from contextvars import ContextVar

LOADED_FOR: ContextVar[int | None] = ContextVar("loaded_for", default=None)
"""position of the first sample of that step, in the order of all samples; None: it loads none"""
