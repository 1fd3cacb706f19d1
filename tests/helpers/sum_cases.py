"""Tasks for the comparison of a batch with its samples: wrong ones, with what the check says, and
right ones, of which it says nothing."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import Animal, EvalNet, Layer, Net, Plain, PlainNet, RecurrentNet, Samples
from zoo_silent_sums import Centred

Loss = tuple[Tensor, dict[str, Tensor]]


def mean_penalty(task: Any, model: nn.Module, batch: dict[str, Tensor], factor: float) -> Loss:
    """Return a loss with a term of the batch's mean."""
    out = task.output(model, batch)
    each = (out - batch["y"]).square().sum(1)
    return each.sum() + factor * out.mean(0).square().sum() * len(out), {"loss": each.detach()}


# --- D. A harmless property.
# -------------------------------------------------------------------------------------------------


class CentredWithBatchNorm(Centred):
    net = staticmethod(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.RReLU(), nn.Linear(8, 3))
    )


class NoisyInLoss(Centred):
    """The loss itself draws, in training only."""

    net = PlainNet

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        noise = torch.randn_like(batch["x"]) if model.training else 0.0
        return model(batch["x"] + 1e-9 * noise)


class CentredLSTM(Centred):
    """The dropout of a recurrent layer is no module of its own."""

    inputs = ("token",)

    def model(self) -> nn.Module:
        net = RecurrentNet(nn.LSTM)
        net.recurrent = nn.LSTM(
            5, 4, num_layers=2, dropout=1e-9, batch_first=True, bidirectional=True
        )
        return net


class OnlyInTraining(Centred):
    """The root module draws by a function, and the loss asks for its mode."""

    class net(PlainNet):  # noqa: N801
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 1e-9, self.training))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return mean_penalty(self, model, batch, 1e-3 if model.training else 0.0)


class SingleSamples(Centred):
    """A micro-batch of one sample has nothing to compare."""

    net = PlainNet


# --- J. A small term.
# -------------------------------------------------------------------------------------------------


class TinyPenalty(Plain):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return mean_penalty(self, model, batch, 1e-6)


class FirstCounts(Plain):
    """The first sample of a batch weighs a little more."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        each = (self.output(model, batch) - batch["y"]).square().sum(1)
        return each.sum() + 1e-5 * each[0], {"loss": each.detach()}


class InHalf(Plain):
    """The penalty is far below the rounding of the weights."""

    def model(self) -> nn.Module:
        return super().model().to(torch.bfloat16)

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"].to(next(model.parameters()).dtype)).float()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return mean_penalty(self, model, batch, 1e-4)


class Constant(PlainNet):
    """A float32 matrix that is no buffer: the model cannot run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.eye(8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.constant)


class OnlyInFloat32(Plain):
    net = Constant

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        return mean_penalty(self, model, batch, 1e-2)


# --- K. The cause.
# -------------------------------------------------------------------------------------------------


class CountingNet(PlainNet):
    """Counts its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not self.training
        return super().forward(x) * (1 + 0.1 * (self.calls % 7))


class CountsEvaluations(Animal):
    net = CountingNet


class SkippingNet(PlainNet):
    """LayerDrop by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() > 0.4:
                x = layer(x)
        return self.head(x)


class Skips(Animal):
    net = SkippingNet


# --- I. A data set that changes what it stores.
# -------------------------------------------------------------------------------------------------


class Shrinking(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        sample["x"].mul_(0.98)
        return dict(sample)


class Shrinks(Plain):
    def train_set(self) -> Any:
        return Shrinking(56, seed=1)


class EvaluationShrinks(Plain):
    def eval_sets(self) -> dict[str, Any]:
        return {"validation": Samples(8, seed=2), "other": Shrinking(8, seed=3)}


class OwnGenerator(Samples):
    def __init__(self, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.generator = torch.Generator().manual_seed(3)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        noise = torch.randn(8, generator=self.generator)
        sample = super().__getitem__(index)
        return sample | {"x": sample["x"] + noise}


class Draws(Plain):
    def train_set(self) -> Any:
        return OwnGenerator(56, seed=1)


class CollateShrinks(Plain):
    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        for sample in samples:
            sample["x"].sub_(0.1)
        return super().collate(samples)


# --- Right ones.
# -------------------------------------------------------------------------------------------------


class ManyDropouts(Animal):
    net = staticmethod(
        lambda: nn.Sequential(
            nn.Linear(8, 8),
            nn.Dropout(0.3),
            nn.AlphaDropout(0.2),
            nn.RReLU(),
            nn.BatchNorm1d(8),
            nn.Linear(8, 3),
        )
    )


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(token)).mean(1))


class AttentionDrops(Animal):
    inputs = ("token",)
    net = Transformer


class Diffusion(Plain):
    """The loss draws in evaluations, too."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        each = (model(batch["x"] + torch.randn_like(batch["x"])) - batch["y"]).square().sum(1)
        return each.sum(), {"loss": each.detach()}


class FreshSamples(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in super().__getitem__(index).items()}


class FreshInPlace(CollateShrinks):
    """Collate changes samples in place, which the data set does not store."""

    def train_set(self) -> Any:
        return FreshSamples(56, seed=1)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": FreshSamples(8, seed=2)}


class MissingValues(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"unknown": torch.tensor([1.0, torch.nan])}


class HasNaN(Plain):
    def train_set(self) -> Any:
        return MissingValues(56, seed=1)


class Float32Inside(PlainNet):
    """Normalises in float32, as transformers models do."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return super().forward(wide.softmax(-1, dtype=torch.float32).to(x.dtype))


class UpAndDown(Animal):
    net = Float32Inside


class KeepsModel(Animal):
    """The task calls the model that it has kept, and a teacher in float32."""

    def model(self) -> nn.Module:
        self.kept, self.teacher = PlainNet(), nn.Linear(8, 3)
        return self.kept

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return self.kept(batch["x"]) + self.teacher(batch["x"]).detach()


class FlatGradients(Net):
    """A parameter whose gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.layer(x) + self.shift).log_softmax(-1))


class ZeroGradient(Animal):
    net = FlatGradients


class NotAdditive(Centred):
    additive = False
    net = PlainNet


class FrozenNorm(Animal):
    net = EvalNet
