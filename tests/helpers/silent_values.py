"""Tasks whose right result one run alone, or a second run, can show: the dry run leaves no trace,
random numbers do not repeat, files are opened in each worker, recomputation, and a resume.

The kinds are E, F, G and H of zoo_silent.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torchmetrics import MetricCollection, SumMetric

from zoo import Layer, Net, Plain, PlainNet, Samples

# --- E. What the first forward changes, which is one of the dry run.
# -------------------------------------------------------------------------------------------------

CALLS: list[int] = []
"""calls of the loss in training in this process, which no model or task owns"""


def _local(tensor: Tensor) -> Tensor:
    """Return the shard of this process."""
    return getattr(tensor, "to_local", lambda: tensor)()


def _in_place(task: Any, model: Any) -> None:
    _local(model.head.weight).mul_(1.5)


def _by_data(task: Any, model: Any) -> None:
    _local(model.head.weight.data).mul_(1.5)


def _by_numpy(task: Any, model: Any) -> None:
    _local(model.head.weight.detach()).numpy()[:] *= 1.5


def _data_assigned(task: Any, model: Any) -> None:
    model.head.weight.data = model.head.weight.data * 1.5


def _replaced(task: Any, model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach() * 1.5)


def _frozen(task: Any, model: Any) -> None:
    model.head.weight.requires_grad_(False)


def _buffer(task: Any, model: Any) -> None:
    model.offset.data.add_(0.5)


def _new_buffer(task: Any, model: Any) -> None:
    model.register_buffer("offset", torch.full((8,), 0.5, dtype=model.offset.dtype))


def _attribute(task: Any, model: Any) -> None:
    model.scale = 1.5


def _list(task: Any, model: Any) -> None:
    model.scales.append(1.5)


def _task_attribute(task: Any, model: Any) -> None:
    task.factor = 1.5


def _data_set(task: Any, model: Any) -> None:
    for sample in task.data.samples:
        sample["x"].mul_(1.5)


def _layer(task: Any, model: Any) -> None:
    model.layers.append(Layer().to(model.offset))


def _hook(task: Any, model: Any) -> None:
    model.head.register_forward_hook(lambda module, given, out: out * 1.5)


def _mode(task: Any, model: Any) -> None:
    model.layers[0].eval()


def _nothing(task: Any, model: Any) -> None:
    pass


CHANGES = {
    change.__name__[1:]: change
    for change in (
        _nothing,
        _in_place,
        _by_data,
        _by_numpy,
        _data_assigned,
        _replaced,
        _frozen,
        _buffer,
        _new_buffer,
        _attribute,
        _list,
        _task_attribute,
        _data_set,
        _layer,
        _hook,
        _mode,
    )
}


class ModeLayer(Layer):
    """A layer that does something else in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.training else 0.5 * x)


class ChangedNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = ModeLayer()
        self.register_buffer("offset", torch.zeros(8))
        self.scale = 1.0
        self.scales: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        factor = self.scale * float(np.prod(self.scales))
        return super().forward(factor * x + self.offset)


class ChangesOnce(Plain):
    """Change something in the first call of the loss of this process.

    Args:
        change: what to change.
    """

    net = ChangedNet

    def __init__(self, change: str = "nothing") -> None:
        self.change = change
        self.factor = 1.0
        self.data = Samples(56, seed=1)

    def train_set(self) -> Any:
        return self.data

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training and not CALLS:
            CALLS.append(1)
            with torch.no_grad():
                CHANGES[self.change](self, getattr(model, "module", model))
        each = self.factor * (model(batch["x"]) - batch["y"]).square().sum(1)
        return each.sum(), {"loss": each.detach()}


class ActNormNet(PlainNet):
    """The first forward in training sets scales from its samples, once."""

    def __init__(self) -> None:
        super().__init__()
        self.actnorm = nn.Parameter(torch.ones(8))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.ready:
            self.actnorm.data.copy_(1 / (x.detach().std(0) + 0.1))
            self.ready = True
        return super().forward(x * self.actnorm)


class ActNorm(Plain):
    """Records the indices of the micro-batches of training in the file $RECORD."""

    net = ActNormNet

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training and "RECORD" in os.environ:
            with open(os.environ["RECORD"], "a") as file:
                file.write(" ".join(map(str, batch["index"].tolist())) + "\n")
        return super().loss(model, batch)


# --- F. Random numbers of the process, and files.
# -------------------------------------------------------------------------------------------------


class Draws(Plain):
    """The loss draws from all three generators, and records the draws in the file $RECORD-RANK."""

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not model.training:
            return model(batch["x"])
        drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
        if "RECORD" in os.environ:
            with open(f"{os.environ['RECORD']}-{os.environ.get('RANK', '0')}", "a") as file:
                file.write(" ".join(map(repr, drawn)) + "\n")
        return model(batch["x"] + 0.1 * sum(drawn))


class SpecAugmented(Plain):
    """A network that masks features, as Wav2Vec2 does: by numpy."""

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        if model.training:
            x = x * torch.from_numpy(np.random.rand(*x.shape) > 0.2)
        return model(x)


RECORD, WIDE = 30, 8


def write_records(file: Path, number: int) -> None:
    """Write a file of fixed-size records, each with its index."""
    file.write_bytes(b"".join(bytes([index % 251]) * RECORD for index in range(number)))


class LazyRecords:
    """Open the file $RECORDS at the first item: once in each worker.

    The processes that read a sample are recorded in $RECORDS.pids. It cannot be pickled.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.file: Any = None
        self.pid = 0
        self.identity = lambda value: value  # no pickle

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.file is None:
            self.file = open(os.environ["RECORDS"], "rb")  # noqa: SIM115
            self.pid = os.getpid()
        if self.pid != os.getpid():
            raise RuntimeError("the file is used in another process than the one that opened it")
        self.file.seek(RECORD * index)
        values = torch.frombuffer(bytearray(self.file.read(RECORD)), dtype=torch.uint8).float()
        wrong = (values != index % 251).any().float()
        return {"x": values[:WIDE] / 251, "y": torch.zeros(3), "wrong": wrong}


class SharedRecords(LazyRecords):
    """Without the check of the process, as h5py and lmdb users write it."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.pid = os.getpid()
        return super().__getitem__(index)


class Lazy(Plain):
    """Counts wrong samples, in training and in evaluations, and shows some."""

    kind: Callable[[int], Any] = LazyRecords

    def train_set(self) -> Any:
        return type(self).kind(1024)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": type(self).kind(256)}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        each = (self.output(model, batch) - batch["y"]).square().sum(1)
        found = {"loss": each.detach(), "row": batch["wrong"], "wrong": batch["wrong"].mean()}
        return each.sum(), found

    def metrics(self) -> Any:
        return MetricCollection({"wrong": SumMetric()})

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["row"])

    def show(self, sample: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        return {"text": "a record"}


class Shared(Lazy):
    kind = SharedRecords


# --- G. Blocks that recompute.
# -------------------------------------------------------------------------------------------------


class NumpyBlock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        kept = torch.from_numpy(np.random.rand(8) > 0.3) if self.training else 1.0
        return x + kept * super().forward(x)


class PythonBlock(Layer):
    """LayerDrop inside the block."""

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.training and random.random() < 0.5
        return x + (0.0 if skipped else 1.0) * super().forward(x)


class TorchBlock(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.dropout(super().forward(x), 0.3, self.training)


class OwnGeneratorBlock(Layer):
    """Its own generator, which only the block knows."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.from_numpy(self.numbers.random(8) > 0.3) if self.training else 1.0
        return x + kept * super().forward(x)


class CountingBlock(Layer):
    """A scale that grows with the number of forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return x + min(1.0, 0.05 * self.calls) * super().forward(x)


class NormBlock(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(self.norm(x))


class SumNormBlock(NormBlock):
    """BatchNorm with a cumulative average: the number of batches is part of the statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, momentum=None)


class AverageBlock(Layer):
    """A running average that only evaluations read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(x.detach().mean(0), 0.1)
            return x + super().forward(x)
        return x + super().forward(x - self.average)


class SpectralBlock(Layer):
    """Spectral norm: each forward moves its vectors by a power iteration."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.inner)


BLOCKS = {
    "numpy": NumpyBlock,
    "python": PythonBlock,
    "torch": TorchBlock,
    "own generator": OwnGeneratorBlock,
    "counter": CountingBlock,
    "BatchNorm": NormBlock,
    "cumulative BatchNorm": SumNormBlock,
    "average": AverageBlock,
    "spectral norm": SpectralBlock,
}


class BlocksNet(Net):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputed(Plain):
    """Train three blocks.

    Args:
        block: their kind.
    """

    def __init__(self, block: str = "torch") -> None:
        self.block = block

    def model(self) -> nn.Module:
        return BlocksNet(BLOCKS[self.block])


# --- H. State of each process that a resume needs.
# -------------------------------------------------------------------------------------------------


class BatchRenorm(nn.Module):
    """Batch renormalization (Ioffe 2017): training uses the running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) / self.deviation
        mean, deviation = x.mean(0), x.std(0) + 1e-5
        scale = (deviation.detach() / self.deviation).clamp(1 / 3, 3)
        shift = ((mean.detach() - self.mean) / self.deviation).clamp(-5, 5)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.deviation.lerp_(deviation, 0.1)
        return (x - mean) / deviation * scale + shift


class RenormNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.renorm = BatchRenorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.renorm(x))


class CarriedNet(PlainNet):
    """An LSTM that carries its state to the next batch, in a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8)
        self.register_buffer("carried", torch.zeros(2, 1, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h, c = (one.contiguous() for one in self.carried.clone())
        out, (h, c) = self.recurrent(x, (h, c))
        if self.training:
            self.carried.copy_(torch.stack([h, c]).detach())
        return super().forward(out)


class ReplacedStateNet(PlainNet):
    """A centre of the batches so far; each forward assigns a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.centre = 0.8 * self.centre + 0.2 * x.detach().mean(0)
        return super().forward(x - self.centre)


class LateStateNet(ReplacedStateNet):
    """As above, from the 4th forward on: the dry run does not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return PlainNet.forward(self, x - self.centre)
        self.forwards += 1
        if self.forwards <= 8:
            return PlainNet.forward(self, x - self.centre)
        return super().forward(x)


CARRIED = {
    "BatchRenorm": RenormNet,
    "LSTM": CarriedNet,
    "replaced": ReplacedStateNet,
    "late": LateStateNet,
}


class Carried(Plain):
    """Train a network with state that moves.

    Args:
        state: its kind.
    """

    additive = False

    def __init__(self, state: str = "BatchRenorm") -> None:
        self.state = state

    def model(self) -> nn.Module:
        return CARRIED[self.state]()
