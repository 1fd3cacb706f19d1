"""Small tasks for tests, with real data sets and models; every process records the samples that it
loads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oneloop.measure.flops import Operations

WORDS = 13


def drawn(folder: Path, rank: int, *, micro: int = 99) -> list[int]:
    """Return the ids that a rank loaded for training, in order, without those of the preflight
    check and comparison."""
    from oneloop.checks.samples import SAMPLED
    from oneloop.data.fingerprint import SAMPLES, TWICE

    before = 2 * min(SAMPLED, max(2, micro)) + SAMPLES + TWICE
    return [int(line) for line in (folder / f"drawn-{rank}.txt").read_text().split()][before:]


class Sequences:
    """Token sequences of 2 to 9 tokens, the same on every machine."""

    def __init__(self, count: int, *, seed: int, record: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 10, (count,), generator=generator).tolist()
        self.samples = [
            torch.randint(0, WORDS, (length,), generator=generator) for length in lengths
        ]
        folder = os.environ.get("TINY_FOLDER")
        self.record = (
            Path(folder, f"drawn-{os.environ.get('RANK', '0')}.txt") if record and folder else None
        )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        if self.record:
            with self.record.open("a") as file:
                file.write(f"{index}\n")
        return self.samples[index]


class Net(nn.Module):
    """Predict the next token from the current one."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.inner = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(torch.tanh(self.norm(self.inner(self.embedding(tokens))))))


class Ragged:
    """Next-token prediction on sequences of different lengths.

    Args:
        samples: training sequences.
        held_out: validation sequences.
        width: of the model.
        dropout: probability of the dropout before the head.
        spoiled: index of the sequence whose loss is NaN in training (-1: none).
        infinite: index of the sequence whose loss is infinite, with finite gradients (-1: none).
        loud: index of the sequence whose loss is multiplied by ten thousand (-1: none).
        weightless: index of the sequence with weight 0 (-1: none).
    """

    unit = "tokens"

    def __init__(
        self,
        samples: int = 37,
        held_out: int = 11,
        width: int = 8,
        dropout: float = 0.0,
        spoiled: int = -1,
        infinite: int = -1,
        loud: int = -1,
        weightless: int = -1,
    ) -> None:
        self.samples, self.held_out, self.width, self.dropout = samples, held_out, width, dropout
        self.spoiled, self.infinite, self.loud, self.weightless = (
            spoiled,
            infinite,
            loud,
            weightless,
        )

    def model(self) -> nn.Module:
        return Net(self.width, self.dropout)

    def train_set(self) -> Any:
        return Sequences(self.samples, seed=1, record=True)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": Sequences(self.held_out, seed=2)}

    def collate(self, samples: list[Tensor]) -> dict[str, Tensor]:
        padded = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
        return {"input": padded[:, :-1].clamp(min=0), "target": padded[:, 1:]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return ((batch["target"] != -100) & (batch["index"] != self.weightless)[:, None]).sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        logits = model(batch["input"]).to(torch.promote_types(batch["input"].dtype, torch.float32))
        if logits.dtype != torch.float64 and next(model.parameters()).dtype == torch.float64:
            logits = model(batch["input"])
        each = F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten(), reduction="none")
        each = each.view_as(batch["target"])
        for index, factor in ((self.spoiled, torch.nan), (self.loud, 1e4)):
            if index >= 0 and model.training:
                each = each * torch.where(batch["index"] == index, factor, 1.0)[:, None]
        if self.infinite >= 0 and model.training:
            each = each + torch.where(batch["index"] == self.infinite, torch.inf, 0.0)[:, None]
        return each.sum(), {"loss": each.detach()}


class Normed(Ragged):
    """With BatchNorm, in a module that can be frozen."""

    def model(self):
        net = super().model()
        net.norm = _Flat(2 * self.width)
        return net


class _Flat(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, values):
        return self.norm(values.flatten(0, 1)).unflatten(0, values.shape[:2])


def three_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))


def backward(net: nn.Module, scale: float = 1.0) -> None:
    net.zero_grad()
    (net(torch.ones(4, 5)).square().sum() * scale).backward()


def training_flops(model: nn.Module, loss, batch: dict) -> float:
    """Return the counted operations of one forward and backward of ``batch`` by a task's
    ``loss(model, batch)``."""
    with Operations() as counted:
        value, _ = loss(model, batch)
        counted.backward = True
        value.backward()
    return counted.total
