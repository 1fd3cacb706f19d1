"""What the preflight check finds out about a task and its model, for the run."""

from dataclasses import dataclass, field
from typing import Any

import torch

from oneloop.basics.seeds import other_states


@dataclass
class Others:
    """Whether training draws from Python's or numpy's generator, as far as is known.

    A checkpoint keeps it, so that a resumed run seeds these generators if the run did.
    """

    drawn: bool = False
    drew: bool = False  # whether a step of this rank was the first that drew: not yet reported
    before: tuple[Any, ...] | None = None  # their states before a forward that is watched

    def watch(self) -> None:
        """Watch the forward and backward that follow, unless it is known that they draw."""
        if not self.drawn:
            self.before = other_states()

    def look(self) -> None:
        """Find out whether a watched forward or backward drew."""
        if self.before is not None:
            self.drew = self.drawn = self.before != other_states()
            self.before = None

    def state_dict(self) -> dict[str, bool]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        self.drawn = self.drawn or bool(state["drawn"])


@dataclass
class Preflight:
    """Result of the preflight check, whose questions fill it in one after another."""

    flops: float = 0.0  # floating-point operations of training on one sample
    additive: bool = True  # whether the loss of a batch is the sum of its samples' losses
    draws: bool = False  # whether collate, model or loss draw random numbers in training
    collate_draws: bool = False
    others: Others = field(default_factory=Others)
    metrics: tuple[str, ...] = ()  # names of 0-dim outputs of the loss in training
    unused: list[str] = field(default_factory=list)  # trained parameters that the loss does not use
    # parameters, then buffers, that a forward in training changes: "buffer norm.running_mean"
    moved: list[str] = field(default_factory=list)
    stateful: str = ""  # why the same samples and seeds do not give the same loss each time
    not_summed: str = ""
    """a parameter whose gradient of a batch is not the sum of those of its samples"""
    graph: Any = None  # the model graph for TensorBoard, on rank 0
    notes: list[str] = field(default_factory=list)  # remarks for the start-up log


def metric_names(outputs: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the real 0-dim outputs, which are logged as metrics, without ``loss``."""
    numbers = {n: value for n, value in outputs.items() if torch.is_tensor(value) and n != "loss"}
    return tuple(n for n, value in numbers.items() if not value.ndim and not value.is_complex())
