"""A task in which something goes wrong; its arguments set the fault, the rank, the function and the
moment."""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torchmetrics
from torch import Tensor, nn

from oneloop.basics.heartbeats import BEATS, TRAINING
from oneloop.supervise.pipe import ADDRESS
from tiny import Ragged, Sequences


class Unspeakable(Exception):
    """An exception whose message cannot be formatted."""

    def __str__(self) -> str:
        raise ValueError("no words")


def happens(fault: str) -> None:
    """Cause one fault."""
    name, _, value = fault.partition(":")
    if name == "raise":
        kinds = (
            ValueError,
            StopIteration,
            MemoryError,
            KeyboardInterrupt,
            asyncio.CancelledError,
            Unspeakable,
        )
        raise next(kind for kind in kinds if kind.__name__ == value)("the fault")
    if name == "thread":
        threading.Thread(target=time.sleep, args=(float(value),)).start()
    if name == "at_exit":
        atexit.register(_work, float(value))
    if name == "exit":
        sys.exit(int(value))
    if name == "os_exit":
        os._exit(int(value))
    if name == "kill":
        os.kill(os.getpid(), getattr(signal, value))
    if name == "loop":
        while True:
            pass
    if name == "sleep":
        time.sleep(float(value))
    if name == "garbage":  # to the port of rank 0's supervisor, followed by a hang
        host, port, _ = os.environ[ADDRESS].split()
        for line in (
            b"[]",
            b'{"word": "\xc3\xa9"}',
            b"[" * 200_000,
            b'{"word": []}',
            b"\xff",
            b"x" * (1 << 21),
        ):
            with socket.create_connection((host, int(port))) as stranger, suppress(OSError):
                stranger.sendall(line + b"\n")
        time.sleep(600)
    if name == "read":
        reading, _ = os.pipe()
        os.read(reading, 1)


def _work(seconds: float) -> None:
    """Use the CPU for a time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


class Samples(Sequences):
    """Sequences with one fault."""

    def __init__(self, *given: Any, task: Faulty, **more: Any) -> None:
        super().__init__(*given, **more)
        self.task, self.loaded = task, 0

    def __getitem__(self, index: int) -> Tensor:
        if BEATS.now_in.startswith(TRAINING):
            if self.loaded and self.loaded % len(self) == 0:
                time.sleep(self.task.epoch_pause)
            self.loaded += 1
        self.task.come("sample")
        return super().__getitem__(index)


class SlowMetric(torchmetrics.MeanMetric):
    """A mean whose ``compute`` is slow."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause

    def compute(self) -> Tensor:
        time.sleep(self.pause)
        return super().compute()


class Faulty(Ragged):
    """A task with one fault, see :func:`happens`.

    Args:
        fault: name of the fault ("": none).
        where: the function with the fault: ``init``, ``sample`` or ``loss``.
        rank: the process with the fault (-1: all).
        at: number of good calls before it, from the first step on.
        once: a file that is created before the fault; if it exists, there is no fault.
        pause: seconds per loss.
        slow: the share of losses that take a hundred times as long.
        eval_pause: seconds per loss in evaluation.
        epoch_pause: seconds of the first sample of every epoch after the first.
        compute_pause: seconds of the metric's ``compute``; 0: no metric.
        unlike: how rank 1 differs: ``shorter`` or ``other`` training data, ``wider`` model.
    """

    def __init__(
        self,
        fault: str = "",
        where: str = "loss",
        rank: int = 0,
        at: int = 20,
        once: str = "",
        pause: float = 0.0,
        slow: float = 0.0,
        eval_pause: float = 0.0,
        epoch_pause: float = 0.0,
        compute_pause: float = 0.0,
        unlike: str = "",
        samples: int = 64,
        **more: Any,
    ) -> None:
        self.unlike = unlike if os.environ.get("RANK") == "1" else ""
        super().__init__(samples=samples - 4 * (self.unlike == "shorter"), **more)
        self.width += self.unlike == "wider"
        self.fault, self.where, self.rank, self.at, self.once, self.pause = (
            fault,
            where,
            rank,
            at,
            once,
            pause,
        )
        self.slow, self.eval_pause, self.epoch_pause = slow, eval_pause, epoch_pause
        if compute_pause:
            self.metrics = lambda: torchmetrics.MetricCollection(
                {"mean": SlowMetric(compute_pause)}
            )
            self.update = lambda metric, batch, outputs: metric.update(outputs["loss"])
        self.come_by = 0
        self.come("init")

    def come(self, where: str) -> None:
        if (
            not self.fault
            or where != self.where
            or self.rank not in (-1, int(os.environ.get("RANK", "0")))
        ):
            return
        self.come_by += 1
        if self.come_by > self.at and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            happens(self.fault)

    def train_set(self) -> Any:
        return Samples(self.samples, seed=2 if self.unlike == "other" else 1, task=self)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training:
            # the same in every run
            slow = random.Random(int(batch["index"].sum())).random() < self.slow
            time.sleep(self.pause * (100 if slow else 1))
            self.come("loss")
        else:
            time.sleep(self.eval_pause)
        return super().loss(model, batch)
