"""Silent cases of state that is no tensor of the model.

The kinds: B, state in Python objects, which acts late; I, data sets that change what they store.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo import EQUAL, Animal, Expected, Plain, PlainNet, Samples, reported, stopped
from zoo_silent import AGAIN, ANY, LONG, SILENT, silent, state

__all__ = ["SILENT"]

# --- B. State in Python objects, which acts late.
# ----------------------------------------------------------------------------------


MODEL_STATE = state("loss|gradient|state")
DATA_STATE = {
    name: tuple((kind, words and ("data set",)) for kind, words in expected)
    for name, expected in state().items()
}


def by_chance(expected: dict[str, Expected]) -> dict[str, Expected]:
    """Also allow equal weights, which some layouts have by chance."""
    return {name: EQUAL + one for name, one in expected.items()}


class QueueNet(PlainNet):
    """MoCo's queue of keys in an attribute; it is used from the 6th forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.training:
            return out
        self.calls += 1
        keys, self.keys = self.keys, [*self.keys[-3:], out.detach()]
        if self.calls > 5 and keys:
            out = out + 0.3 * torch.tanh(out @ torch.cat(keys).T).mean(1, keepdim=True)
        return out


@silent("B", *LONG, wide=True, **MODEL_STATE)
class MomentumQueue(Animal):
    net = QueueNet


class CountingSamples(Samples):
    """Scale samples from the 40th read on (a curriculum)."""

    reads = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.reads += 1
        sample = super().__getitem__(index)
        if self.reads <= 40:
            return sample
        return sample | {"x": sample["x"] * (1 + 0.05 * (self.reads % 5))}


@silent("B", *LONG, wide=True, **DATA_STATE)
class CountingData(Plain):
    def train_set(self) -> Any:
        return CountingSamples(56, seed=1)


@silent("B", *LONG, "--machine.workers", "1", **DATA_STATE)
class CountingInWorkers(CountingData):
    """The same in a data worker, which counts for itself."""


@silent("B", *LONG, **MODEL_STATE)
class WarmedUpTerm(Plain):
    """The loss counts its calls, and adds a term slowly from the 12th call on."""

    def __init__(self) -> None:
        self.calls = 0

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        total, outputs = super().loss(model, batch)
        self.calls += model.training
        if not model.training or self.calls < 12:
            return total, outputs
        share = min(1.0, 0.05 * (self.calls - 11))
        return total + share * model(batch["x"]).abs().sum(), outputs


@silent("B", *LONG, **MODEL_STATE)
class HardExamples(Plain):
    """Samples weigh more if they lost much when they were seen before, in the second epoch on."""

    def __init__(self) -> None:
        self.known: dict[int, float] = {}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        each = (self.output(model, batch) - batch["y"]).square().sum(1)
        if model.training:
            seen = batch["index"].tolist()
            factors = [1 + np.tanh(self.known.get(index, 0.0)) for index in seen]
            self.known |= zip(seen, each.tolist(), strict=True)
            each = each * torch.tensor(factors).to(each)
        return each.sum(), {"loss": each.detach()}


class LateNoiseNet(PlainNet):
    """Own generator, from the 12th forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls >= 12:
            x = x + 0.1 * torch.from_numpy(self.numbers.standard_normal(x.shape)).to(x)
        return super().forward(x)


@silent("B", *LONG, **MODEL_STATE)
class LateNoise(Animal):
    net = LateNoiseNet


class LockedNet(PlainNet):
    """Variational dropout whose mask is drawn once for each batch size, and then kept."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if len(x) not in self.masks:
                self.masks[len(x)] = (torch.rand(8) > 0.3).to(x)
            x = x * self.masks[len(x)]
        return super().forward(x)


@silent(
    "B",
    *LONG,
    plain=reported(f"{AGAIN}|random"),
    grain=EQUAL + stopped(AGAIN, "loss|gradient|state|mask"),
)
class LockedDropout(Animal):
    """Equal with the grain if the dry run drew the mask, or if it is drawn from the same seed."""

    net = LockedNet


# One process does not change by itself: a switch that a second forward does not show.
RANK = state("rank|calls") | {"single": ANY}


class RankNet(PlainNet):
    """Noise that depends on the rank, after a few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = int(os.environ.get("RANK", "0"))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls >= 9:
            drawn = torch.Generator().manual_seed(self.rank)
            x = x + 0.2 * torch.randn(8, generator=drawn, dtype=x.dtype)
        return super().forward(x)


@silent("B", *LONG, wide=True, **RANK)
class RankNoise(Animal):
    net = RankNet


class WorkerSamples(Samples):
    """Augmentation that is seeded by the number of the data worker."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        worker = torch.utils.data.get_worker_info()
        return sample | {"x": sample["x"] + 0.1 * (0 if worker is None else worker.id)}


@silent("B", *LONG, "--machine.workers", "2", **by_chance(DATA_STATE))
class WorkerNoise(Plain):
    def train_set(self) -> Any:
        return WorkerSamples(56, seed=1)


class ClassState(PlainNet):
    """An exponential average in a class attribute, which acts from the 12th forward on."""

    average: float = 0.0
    calls: int = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            ClassState.calls += 1
            ClassState.average = 0.9 * ClassState.average + 0.1 * float(x.detach().abs().mean())
            if ClassState.calls >= 12:
                x = x / (0.5 + ClassState.average)
        return super().forward(x)


@silent("B", *LONG, **MODEL_STATE)
class ClassAttribute(Animal):
    net = ClassState


# --- I. A data set that changes what it stores.
# -------------------------------------------------------------------------------------------------


def stored(*words: str) -> dict[str, Expected]:
    """Expect a message on the data set. One process alone is right, as a plain loop is."""
    words = words or ("data set|train_set|__getitem__|sample|collate", "in place|stored|chang")
    return {
        "plain": reported(*words) + stopped(*words),
        "grain": stopped(*words),
        "single": EQUAL + reported(*words) + stopped(*words),
        "single_grain": EQUAL + stopped(*words),
    }


class ScaledRows(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["x"].mul_(0.95)
        return dict(sample)


@silent("I", *LONG, wide=True, **stored())
class ScaledRow(Plain):
    def train_set(self) -> Any:
        return ScaledRows(56, seed=1)


class RewrittenDict(Samples):
    """A transform that assigns to the stored dict."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        sample["x"] = sample["x"] * 0.95
        return sample


@silent("I", *LONG, **stored())
class RewrittenSample(Plain):
    def train_set(self) -> Any:
        return RewrittenDict(56, seed=1)


class ShuffledRows(Samples):
    """``np.random.shuffle`` of a row, which is a view of the table."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.table = torch.stack([sample["x"] for sample in self.samples]).numpy()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.table[index]
        np.random.shuffle(row[:3])
        return self.samples[index] | {"x": torch.from_numpy(row)}


@silent("I", *LONG, **stored())
class ShuffledView(Plain):
    def train_set(self) -> Any:
        return ShuffledRows(56, seed=1)


@silent("I", *LONG, **stored())
class CentredByCollate(Plain):
    """Collate subtracts in place, from the tensors that the data set stores."""

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        for sample in samples:
            sample["x"].sub_(0.1 * sample["x"].mean())
        return super().collate(samples)


class CachedRows(Samples):
    """Cache each sample after its augmentation: all epochs have the noise of the first use."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.cache: dict[int, dict[str, Tensor]] = {}

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index not in self.cache:
            sample = super().__getitem__(index)
            self.cache[index] = sample | {"x": sample["x"] + 0.2 * torch.randn(8)}
        return self.cache[index]


@silent("I", *LONG, **stored("data set"))
class CachedAugmentation(Plain):
    def train_set(self) -> Any:
        return CachedRows(56, seed=1)
