"""More silent cases: losses that are no sums behind a property that switched the check off, random
numbers of numpy and Python, evaluations, and small terms.

The kinds: D, a harmless property switches a check off; F, random numbers of the process; H, a check
in one of two places; J, a term below a tolerance.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric, MetricCollection
from torchmetrics.retrieval import RetrievalMAP, RetrievalMRR

from zoo import (
    EQUAL,
    FIND,
    Animal,
    Expected,
    FunctionNet,
    ListMetrics,
    Net,
    Plain,
    PlainNet,
    Samples,
    rejected,
    reported,
    stopped,
)
from zoo_silent import EVALUATED, LONG, SILENT, buffer, parameter, silent, state

__all__ = ["SILENT"]

FLOAT32 = ("--machine.dtype", "float32")
NO_SUM: dict[str, Expected] = {
    "plain": rejected("additive"),
    "grain": EQUAL + rejected("additive"),
}
"""a loss that is not a sum over samples; with the grain it is the same on every layout"""


def no_linear(*names: str) -> dict[str, Expected]:
    """Expect a line on a gradient that is not the sum over samples; it names a tensor."""
    return {"plain": reported("gradient", "sum", "|".join(names)), "grain": EQUAL}


# --- D. A harmless property switches the comparison of sums off.
# -------------------------------------------------------------------------------------------------


class FaintNet(PlainNet):
    """Dropout that never drops."""

    def __init__(self, drop: nn.Module | None = None) -> None:
        super().__init__()
        self.drop = drop or nn.Dropout(1e-9)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(super().forward(x))


class Focal(Animal):
    """The loss of a batch is divided by its number of positives (RetinaNet)."""

    net: Any = FaintNet

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        each = (self.output(model, batch) - batch["y"]).square().sum(1)
        positives = batch["route"].eq(1).sum().clamp(min=1)
        return 0.1 * each.sum() * len(each) / positives, {"loss": each.detach()}


@silent("D", wide=True, **NO_SUM)
class FaintFocal(Focal):
    pass


class Centred(Animal):
    """A variance over the batch is part of the loss."""

    net: Any = FaintNet

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.output(model, batch)
        each = (out - batch["y"]).square().sum(1) + 0.5 * (out - out.mean(0)).square().sum(1)
        return each.sum(), {"loss": each.detach()}


@silent("D", **NO_SUM)
class FaintCentred(Centred):
    pass


class Normalise(torch.autograd.Function):
    """Normalise the gradient of the whole micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (gradient.norm() + 1e-6)


@silent("D", **no_linear("layers.0.inner"))
class FaintNormaliser(Animal):
    net = staticmethod(lambda: nn.Sequential(FunctionNet(Normalise.apply), nn.Dropout(1e-9)))


class FrequencyNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, scale_grad_by_freq=True)
        self.drop = nn.Dropout(1e-9)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.drop(self.embedding(token).mean(1)))


@silent("D", **no_linear("embedding", "scale_grad_by_freq"))
class FaintFrequency(Animal):
    inputs = ("token",)
    net = FrequencyNet


class DropPath(nn.Module):
    """Stochastic depth, as models define it themselves: torch does not know the class."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1) >= 1e-9)


@silent("D", **NO_SUM)
class OwnDropPath(Focal):
    net = staticmethod(lambda: FaintNet(DropPath()))


class FunctionalNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 1e-9, self.training))


@silent("D", **NO_SUM)
class FunctionalDropout(Centred):
    net = FunctionalNet


@silent("D", **NO_SUM)
class RandomLeaks(Centred):
    """RReLU draws, and is no dropout."""

    net = staticmethod(lambda: FaintNet(nn.RReLU()))


class AttentionNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, dropout=1e-9, batch_first=True)

    def forward(self, token: Tensor) -> Tensor:
        h = self.embedding(token)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


@silent("D", **NO_SUM)
class AttentionDropout(Focal):
    inputs = ("token",)
    net = AttentionNet


@silent("D", **NO_SUM)
class DrawnInCollate(Centred):
    """Collate adds noise that nobody sees."""

    net = PlainNet

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return batch | {"x": batch["x"] + 1e-12 * torch.randn(batch["x"].shape)}


class Whole(Animal):
    """A loss over the whole batch: samples of one route are near each other."""

    loss = None  # type: ignore[assignment]
    batch_columns: tuple[str, ...] = ("route",)
    net: Any = PlainNet

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"e": F.normalize(self.output(model, batch), dim=1)}

    def batch_loss(
        self, parts: dict[str, Tensor], columns: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        from oneloop.tasks.contrastive import supervised

        return supervised(parts["e"], columns["route"].long(), 4.0), {}


EMBED: dict[str, Expected] = {
    "plain": rejected("embed", "other samples"),
    "grain": EQUAL + rejected("embed", "other samples"),
}


@silent("D", **EMBED)
class WholeBatchDrops(Whole):
    """Rows that depend on their batch, in a model that draws."""

    net = FunctionalNet

    def embed(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        out = self.output(model, batch)
        return {"e": F.normalize(out - 0.5 * out.mean(0) if model.training else out, dim=1)}


# --- F. Random numbers of numpy and Python in a forward.
# -------------------------------------------------------------------------------------------------


class LayerDropNet(PlainNet):
    """Skip layers by Python's generator, as transformers models do."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or random.random() > 0.4:
                x = layer(x)
        return self.head(x)


DRAWN = reported("random numbers|draws|drawn")
SKIPS = stopped("FSDP2", "unit", "random|draw")


@silent(
    "F", *FIND, plain=DRAWN, grain=EQUAL, fsdp2=SKIPS, fsdp2_grain=EQUAL + SKIPS
)  # fmt: skip
class LayerDrop(Animal):
    net = LayerDropNet


class MaskedNet(PlainNet):
    """SpecAugment: numpy draws the features to mask, as in Wav2Vec2."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.from_numpy(np.random.rand(*x.shape) > 0.2)
        return super().forward(x)


@silent("F", wide=True, plain=DRAWN, grain=EQUAL)
class SpecAugment(Animal):
    net = MaskedNet


@silent("F", "--machine.recompute", "full", plain=DRAWN, grain=EQUAL)
class SpecAugmentAgain(SpecAugment):
    """With blocks that recompute."""


@silent("F", "--machine.workers", "2", plain=DRAWN, grain=EQUAL)
class SpecAugmentWorkers(SpecAugment):
    """With data workers, so that the process's generators are not touched by the data."""


@silent("F", plain=DRAWN, grain=EQUAL)
class NumpyMixing(Plain):
    """The loss draws a share by numpy and a sign by Python."""

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if not model.training:
            return model(batch["x"])
        share = float(np.random.beta(0.5, 0.5)) * random.choice([1, -1])
        return model(batch["x"] + 0.2 * share * batch["x"].flip(1))


@silent("F", plain=DRAWN, grain=EQUAL)
class ShuffledColumns(Plain):
    """The loss permutes columns by Python's ``shuffle``."""

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        order = list(range(8))
        if model.training:
            random.shuffle(order)
        return model(batch["x"][:, order])


# --- H. Evaluations, columns of unusual types, and what they leave.
# -------------------------------------------------------------------------------------------------


class EvalBufferNet(PlainNet):
    """Statistics that only evaluations update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.center.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return super().forward(x - self.center)


@silent("H", *EVALUATED, "--eval.micro", "2", wide=True, **buffer("center"))
class EvalBuffer(Animal):
    net = EvalBufferNet


class LateEvalBufferNet(EvalBufferNet):
    """Statistics that only evaluations update, from the 9th forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not self.training
        if not self.training and self.calls > 8:
            self.center.data += 0.1 * x.detach().mean(0)
        return PlainNet.forward(self, x - self.center)


@silent("H", *EVALUATED, "--eval.micro", "2", **buffer("center"))
class LateEvalBuffer(Animal):
    net = LateEvalBufferNet


class EvalWeightNet(PlainNet):
    """Round a weight in each evaluation (quantization)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            weight = self.head.weight
            weight.data.mul_(0.98)
        return super().forward(x)


@silent("H", *EVALUATED, **parameter("head.weight"))
class EvalWeight(Animal):
    net = EvalWeightNet


class EvalAttributeNet(PlainNet):
    """A scale in a Python attribute, measured in evaluations, which training then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.scale = 0.9 * self.scale + 0.1 * float(x.abs().max())
        return super().forward(x / self.scale)


EVAL_STATE = state("loss|gradient|state|scale")
for layout in ("grain", "single_grain"):
    EVAL_STATE[layout] += rejected("scale", "next evaluation")


@silent("H", *LONG, "--eval.every", "3", "--eval.micro", "2", **EVAL_STATE)
class EvalAttribute(Animal):
    net = EvalAttributeNet


class Queries(ListMetrics):
    """Nine validation batches of two samples: one rank has a batch more than the other."""

    def metrics(self) -> Any:
        return MetricCollection({"mrr": RetrievalMRR(), "map": RetrievalMAP()})

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["score"], batch["y"][:, 0] > 0, indexes=batch["index"] // 4)


UNEVEN = ("--eval.micro", "2", "--eval.every", "5")


@silent("H", *UNEVEN, wide=True)
class UnevenRetrieval(Queries):
    pass


class Median(Metric):
    """A list that no reduction concatenates."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", default=[], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat([value.flatten() for value in self.values]).median()


@silent("H", *UNEVEN)
class UnevenOwnMetric(Queries):
    def metrics(self) -> Any:
        return MetricCollection({"median": Median()})

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics["median"].update(outputs["score"])


@silent("H", "--eval.micro", "16", "--eval.every", "5", grain=EQUAL + rejected("eval.micro"))
class IdleRankRetrieval(Queries):
    """Two validation batches: on four processes, two have none."""


class RaggedRows(Samples):
    """Rows of 3 values in the first half, and of 5 in the second."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"long": torch.tensor(3 if index < 4 else 5)}


class EqualRows(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"long": torch.tensor(5)}


@silent("H", "--eval.every", "4", "--eval.micro", "4", micro=4, all=EQUAL + stopped("pad"))
class RaggedEvaluation(Whole):
    """A column of the loss is padded to the longest sample of a micro-batch."""

    batch_columns = ("route", "pad")

    def train_set(self) -> Any:
        return EqualRows(56, seed=1)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": RaggedRows(8, seed=2)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return batch | {"pad": torch.ones(len(samples), int(batch["long"].max()))}


@silent("H", all=EQUAL)
class Int16Column(Whole):
    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return batch | {"route": batch["route"].to(torch.int16)}


@silent("H", "--eval.every", "4")
class OddColumns(Whole):
    """Columns of types that few collectives know."""

    kinds = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.float16)
    batch_columns = ("route", *map(str, kinds))

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return batch | {str(kind): batch["route"].to(kind) for kind in self.kinds}


# --- J. A term that is below a tolerance, in float32.
# -------------------------------------------------------------------------------------------------

FLOAT64 = ("--machine.dtype", "float64")
"""as ``oneloop prove --double`` trains, for terms below 4e-6 of the loss in float32"""

SMALL: dict[str, Expected] = {
    "plain": rejected("additive") + reported("sum"),
    "grain": EQUAL + rejected("additive"),
}


@silent("J", *FLOAT64, wide=True, **SMALL)
class SmallPenalty(Plain):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.output(model, batch)
        each = (out - batch["y"]).square().sum(1)
        extra = 1e-4 * out.mean(0).square().sum() * len(out)
        return each.sum() + extra, {"loss": each.detach()}


class Waves(Samples):
    """Samples with a wave of 24 to 64 values, of which no two neighbours have equal lengths."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        length = 24 + 8 * (index % 6)
        drawn = torch.Generator().manual_seed(index)
        return sample | {"wave": torch.randn(length, generator=drawn)}


class Padded(Plain):
    """Waves that collate pads with zeros to the longest of the batch."""

    net: Any = PlainNet

    def train_set(self) -> Any:
        return Waves(56, seed=1)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": Waves(8, seed=2)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        waves = [sample["wave"] for sample in samples]
        others = [{n: v for n, v in sample.items() if n != "wave"} for sample in samples]
        lengths = torch.tensor([len(wave) for wave in waves])
        padded = nn.utils.rnn.pad_sequence(waves, batch_first=True)
        return super().collate(others) | {"wave": padded, "samples": lengths}

    def features(self, wave: Tensor, lengths: Tensor) -> Tensor:
        raise NotImplementedError

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"] + self.features(batch["wave"], batch["samples"]))


@silent("J", *FLOAT32, **SMALL)
class StftLeak(Padded):
    """``stft(center=True)`` reflects the end of the longest wave, and zeros of all others."""

    def features(self, wave: Tensor, lengths: Tensor) -> Tensor:
        window = torch.hann_window(16, dtype=wave.dtype)
        found = torch.stft(wave, 16, 8, window=window, center=True, return_complex=True).abs()
        valid = torch.arange(found.size(2)) <= lengths[:, None] // 8
        mean = (found * valid[:, None]).sum(2) / valid.sum(1, keepdim=True)
        return 0.01 * mean[:, :8]


@silent("J", *FLOAT64, **SMALL)
class SoftMask(Padded):
    """A mask of -9 instead of minus infinity: the padding keeps a weight of e^-9."""

    def features(self, wave: Tensor, lengths: Tensor) -> Tensor:
        outside = torch.arange(wave.size(1)) >= lengths[:, None]
        shares = (wave - 9.0 * outside).softmax(1)
        return (shares * wave).sum(1, keepdim=True).expand(-1, 8)


@silent("J", *FLOAT64, **SMALL)
class StableByBatch(Plain):
    """A softmax that subtracts the maximum of the whole batch, and adds 1e-4 to its sum."""

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        powers = (out - out.detach().max()).exp()
        return out + powers / (powers.sum(1, keepdim=True) + 1e-4)


class RoutedNet(PlainNet):
    """A soft mixture of two layers; returns the shares of the router, too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(1)
        h = shares[:, :1] * self.layers[0](x) + shares[:, 1:] * self.layers[1](x)
        return self.head(h), shares


@silent("J", *FLOAT32, **SMALL)
class RouterBalance(Animal):
    """A balancing term with the usual small factor."""

    net = RoutedNet

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out, shares = model(batch["x"])
        each = (out - batch["y"]).square().sum(1)
        balance = 1e-4 * len(each) * shares.mean(0).square().sum()
        return each.sum() + balance, {"loss": each.detach()}


class Nudge(torch.autograd.Function):
    """A backward with a small part that depends on the whole micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 3e-4 * torch.tanh(gradient.norm()))


@silent("J", *FLOAT32, **no_linear("layers.0.inner"))
class SmallNudge(Animal):
    net = staticmethod(lambda: FunctionNet(Nudge.apply))
