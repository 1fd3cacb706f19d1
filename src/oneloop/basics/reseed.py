"""What is random becomes a function of a few numbers."""

from __future__ import annotations

import random

import numpy as np
import torch

from oneloop.basics.seeds import key


def reseed(device: torch.device, *numbers: int, others: bool = False) -> None:
    """Makes what is random in the model a function of these numbers. About a microsecond; ten with ``others``, which
    seeds Python's and numpy's generators too."""
    number = key(*numbers)
    if others:
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(number)
    elif device.type != "cpu":
        torch.manual_seed(number)
