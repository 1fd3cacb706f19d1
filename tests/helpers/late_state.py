"""Tasks with state that acts late in a run, or on one process only."""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import Dataset


class Rows(Dataset):
    """Regression of one number; row n is the same on every process."""

    def __init__(self, count: int = 48) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 4, generator=drawn, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "y": self.x[index].sum().sin()}


class CountingRows(Rows):
    """Rows that grow from the 40th one on that a process loads."""

    loaded = 0

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.loaded += 1
        row = super().__getitem__(index)
        if self.loaded > 40:
            row["x"] = row["x"] * (1 + 0.01 * self.loaded)
        return row


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
        self.calls = 0
        self.queue: list[torch.Tensor] = []

    def forward(self, x):
        self.calls += self.training
        return self.layers(x)[:, 0]


class Queue(Net):
    """Adds the mean of earlier outputs, from the 7th forward on (MoCo)."""

    def forward(self, x):
        out = super().forward(x)
        earlier = torch.stack(self.queue).mean() if self.calls > 6 else 0.0
        if self.training:
            self.queue = [*self.queue, out.detach().mean()][-4:]
        return out + 0.1 * earlier


class OfOneRank(Net):
    """Scales its output on one rank, from the 10th forward on."""

    def forward(self, x):
        out = super().forward(x)
        scaled = self.calls > 9 and os.environ.get("RANK") == "1"
        return out * 1.01 if scaled else out


class Drawing(Net):
    """Draws from numpy and Python in every forward; they are seeded."""

    def forward(self, x):
        import random

        import numpy as np

        out = super().forward(x)
        return out * (1 + 0.1 * random.random() * np.random.rand()) if self.training else out


class Right:
    net = Net
    rows = Rows

    def model(self):
        return self.net()

    def train_set(self):
        return self.rows()

    def eval_sets(self):
        return {"validation": Rows(16)}

    def collate(self, samples):
        return torch.utils.data.default_collate(samples)

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return (model(batch["x"]) - batch["y"]).square().sum(), {}


class LateQueue(Right):
    net = Queue


class LateRank(Right):
    net = OfOneRank


class LateRows(Right):
    rows = CountingRows


class Drawn(Right):
    net = Drawing


class Normed(nn.Module):
    """BatchNorm, and in training from the 9th forward on something that its buffers do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        late = self.training and self.calls > 8
        return self.layers(self.changed(x) if late else x)[:, 0]

    def changed(self, x):
        """Return what the layers get instead of ``x``."""
        raise NotImplementedError


class Shrinking(Normed):
    """The weight of its last layer shrinks, behind its version counter."""

    def changed(self, x):
        self.layers[3].weight.data.mul_(0.97)
        return x


class Noisy(Normed):
    """Draws from a generator of its own, which nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)

    def changed(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.own, dtype=x.dtype)


class ShrinkingNorm(Right):
    net = Shrinking


class NoisyNorm(Right):
    net = Noisy
