"""A task that is slow at one place, and runs with a slow disk."""

from __future__ import annotations

import atexit
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn

from slow_disk import slow_down
from tiny import Ragged, Sequences
from worlds import train

FROZEN = 3 << 20  # values of the frozen layer


class Samples(Sequences):
    """Sequences of which one is slow."""

    def __init__(self, *given: Any, task: Slow, **more: Any) -> None:
        super().__init__(*given, **more)
        self.task = task

    def __getitem__(self, index: int) -> Tensor:
        self.task.come("sample")
        return super().__getitem__(index)


class Mean(torchmetrics.MeanMetric):
    """A mean that is slow to update or compute."""

    task: Slow | None = None

    def update(self, *given: Any, **more: Any) -> None:
        if self.task is not None:
            self.task.come("metric")
        super().update(*given, **more)

    def compute(self) -> Tensor:
        if self.task is not None:
            self.task.come("compute")
        return super().compute()


class Slow(Ragged):
    """A task that is slow once, on one rank, at one place.

    Args:
        place: what is slow.
        seconds: how slow.
        rank: of the process that is slow.
        once: a file that records that it was slow.
        tested: whether there is a test set.
        stops: whether a stop is requested just before.
    """

    def __init__(
        self,
        place: str = "",
        seconds: float = 0.0,
        rank: int = 0,
        once: str = "once",
        tested: bool = False,
        stops: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(samples=64, held_out=32, **more)
        self.place, self.seconds, self.rank, self.once = place, seconds, rank, Path(once)
        self.tested, self.stops = tested, stops
        if place == "exit handler":
            atexit.register(self.come, place)
        if place == "state_dict":
            self.state_dict = self._state
            self.load_state_dict = lambda state: None
        if place == "generation":
            self.generate = self._write
            self.generated_metrics = lambda: torchmetrics.MetricCollection({"length": Mean()})
            self.update_generated = self._measure
        if place == "final":
            self.save = lambda model, folder: self.come(place)

    def come(self, place: str, here: bool = True) -> None:
        """Sleep once, if this is the slow place and rank, after a checkpoint of the run."""
        if place != self.place or not here or os.environ.get("RANK", "0") != str(self.rank):
            return
        begun = Path("run").glob("recipe.yaml" if place == "first step" else "checkpoints/step-*")
        if any(begun) and not self.once.exists():
            self.once.touch()
            if self.stops:
                os.kill(os.getppid(), signal.SIGTERM)  # the supervisor; of a data worker: its owner
            # a signal interrupts no sleep
            time.sleep(self.seconds)

    def _state(self) -> dict[str, Any]:
        self.come("state_dict")
        return {}

    def _write(self, model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
        """Write a text by eight forwards, each of which takes long for the last sample."""
        long = int(batch["index"].max()) > 27
        for _ in range(8):
            model(batch["input"])
            if long:
                time.sleep(self.seconds / 8)
        return ["text"] * len(batch["input"])

    def _measure(self, metrics: Any, batch: dict[str, Tensor], texts: list[str]) -> None:
        metrics["length"].update(float(len(texts)))

    def model(self) -> nn.Module:
        net = super().model()
        if self.place in ("frozen base", "upload"):
            net.frozen = nn.Parameter(torch.zeros(FROZEN), requires_grad=False)
        return net

    def train_set(self) -> Any:
        return Samples(64, seed=1, task=self)

    def eval_sets(self) -> dict[str, Any]:
        more = {"test": Sequences(4, seed=3)} if self.tested else {}
        return {**super().eval_sets(), **more}

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        self.come("collate")
        return super().collate(samples)

    def metrics(self) -> Any:
        mean = Mean()
        mean.task = self
        return torchmetrics.MetricCollection({"mean": mean})

    def update(self, metric: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metric.update(outputs["loss"])

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training:
            time.sleep(0.02)
            self.come("first step")
            self.come("step")
        else:
            self.come("evaluation")
        return super().loss(model, batch)


def slow_disk(argv: Sequence[str]) -> None:
    """Train with a slow disk."""
    from oneloop.checkpoint import background_save

    background_save.WRITER = "slow_disk"
    slow_down()
    train(argv)
