"""The commands ``evaluate`` and ``predict``."""

from argparse import Namespace
from collections.abc import Sequence
from typing import NoReturn

from oneloop.launch.command import hide_warnings_of_torch
from oneloop.tools.after_training.options import parsed
from oneloop.tools.after_training.options import parser_of as parser_of


def evaluate(words: Sequence[str]) -> NoReturn:
    """Print loss and metrics of a run's weights."""
    _run(parsed("evaluate", words))


def predict(words: Sequence[str]) -> NoReturn:
    """Write predictions to a file."""
    _run(parsed("predict", words))


def _run(given: Namespace) -> NoReturn:
    hide_warnings_of_torch()
    from oneloop.tools.after_training.evaluate_and_predict import run

    run(given)
