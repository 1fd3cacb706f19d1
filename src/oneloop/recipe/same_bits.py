"""Which recipes can be the same bits on any number of processes."""

from __future__ import annotations

from oneloop.basics.errors import BadInput
from oneloop.recipe.bookkeeping import EvalConfig
from oneloop.recipe.machine import MachineConfig
from oneloop.recipe.mathematics import OptimizerConfig

_OPTIMIZERS = ("adamw", "sgd", "muon")
"""whose update of an element depends on nothing else, or on the whole matrix"""


def refuse_inexact(grain: int, evaluation: EvalConfig, optimizer: OptimizerConfig, machine: MachineConfig) -> None:
    """Raise BadInput for a key that cannot be combined with ``batch.grain``, and say what to do."""
    asked = f"batch.grain {grain} asks for the same bits on any number of processes, and"
    if evaluation.micro not in (None, grain):
        raise BadInput(
            f"{asked} eval.micro {evaluation.micro} puts another number through the model at once; set eval.micro"
            f" {grain}, or leave it out"
        )
    if optimizer.name not in _OPTIMIZERS:
        what = (
            "takes means over rows and columns" if optimizer.name == "adafactor" else "is not known to be elementwise"
        )
        raise BadInput(f"{asked} optimizer.name {optimizer.name} {what}; use {', '.join(_OPTIMIZERS)}")
    if machine.compile == "whole":
        raise BadInput(
            f"{asked} machine.compile whole makes one graph of what DDP and FSDP2 cut into others; use regional"
        )
    if machine.channels_last is True:
        raise BadInput(f"{asked} machine.channels_last true cannot be had under FSDP2; leave it out")
    if machine.cudnn_benchmark:
        raise BadInput(f"{asked} machine.cudnn_benchmark chooses algorithms by their time; leave it out")
