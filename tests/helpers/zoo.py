"""Small unusual models as tasks, each with its expected outcome on every parallel layout.

``python tests/helpers/zoo.py [NAMES]`` prints a table: model x layout x grain -> outcome (see
zoo_outcomes.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from oneloop.data.order import Order

Expected = tuple[tuple[str, tuple[str, ...]], ...]
"""Alternatives: "equal", "rejected", "stopped", "ended" or "reported", and the words that the
message must contain."""
EQUAL: Expected = (("equal", ()),)


def rejected(*words: str) -> Expected:
    """Expect exit code 2 and a message with these words, without a traceback."""
    return (("rejected", words),)


def late(*words: str) -> Expected:
    """As ``rejected``, or exit code 1: only a later step can show the fault."""
    return (("rejected", words), ("stopped", words))


def stopped(*words: str) -> Expected:
    """Expect exit code 1 or 2 and a message with these words, without a traceback."""
    return (("rejected", words), ("ended", words))


def reported(*words: str) -> Expected:
    """Allow other weights, if a line with these words reports it."""
    return (("reported", words),)


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    name: str
    words: tuple[str, ...]
    """more words for the command line"""
    expected: dict[tuple[str, bool], Expected] = field(default_factory=dict)
    """by (single, ddp or fsdp2; whether batch.grain is set)"""
    micro: int | None = None
    """samples of a micro-batch; None: 2 with the grain, without it a process's share of the
    batch"""
    module: str = "zoo"
    """where the task class is defined"""
    kind: str = ""
    """the kind of its silent difference (zoo_silent.py)"""
    wide: bool = True
    """also tried on four processes"""


ZOO: dict[str, Entry] = {}
FIND = ("--machine.find_unused_parameters", "true")
ADAMW = ("--optimizer.name", "adamw", "--optimizer.lr", "0.01", "--optimizer.eps", "1e-4")


def animal(
    *words: str,
    micro: int | None = None,
    into: dict[str, Entry] = ZOO,
    kind: str = "",
    wide: bool = True,
    all: Expected = EQUAL,
    plain: Expected | None = None,
    grain: Expected | None = None,
    **special: Expected,
) -> Callable[[type], type]:
    """Register a task class.

    Args:
        words: additional command-line words.
        micro: samples per micro-batch.
        into: where to register the class.
        kind: kind of its silent difference.
        wide: whether to try four processes, too.
        all: expected everywhere.
        plain: expected without ``batch.grain``.
        grain: expected with it.
        special: expected on one family: ``ddp``, or ``ddp_grain`` with ``batch.grain``.
    """

    def registered(task: type) -> type:
        expected = {}
        for family in ("single", "ddp", "fsdp2"):
            expected[family, False] = special.get(family, plain or all)
            expected[family, True] = special.get(f"{family}_grain", grain or all)
        name = task.__name__
        into[name] = Entry(name, words, expected, micro, task.__module__, kind, wide)
        return task

    return registered


class Samples:
    """Samples with several kinds of fields, the same on every machine."""

    def __init__(self, count: int, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.samples = [
            {
                "x": torch.randn(8, generator=drawn),
                "y": torch.randn(3, generator=drawn),
                "route": torch.randint(0, 4, (), generator=drawn),
                "rare": torch.rand((), generator=drawn) < 0.12,
                "token": torch.randint(0, 16, (4,), generator=drawn),
                "length": torch.randint(1, 5, (), generator=drawn),
                "picture": torch.randn(2, 4, 4, generator=drawn),
            }
            for _ in range(count)
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]


class Animal:
    """Regression of three numbers."""

    inputs: tuple[str, ...] = ("x",)
    net: Callable[[], nn.Module]

    def model(self) -> nn.Module:
        return type(self).net()

    def train_set(self) -> Any:
        return Samples(56, seed=1)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": Samples(8, seed=2)}

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(*(batch[name] for name in self.inputs))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        each = (self.output(model, batch) - batch["y"]).square().sum(1)
        return each.sum(), {"loss": each.detach()}


class Layer(nn.Module):
    """A block; FSDP2 gathers each of the two blocks in a list separately."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Net(nn.Module):
    """Any module, then a linear head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.head = nn.Linear(width, 3)


# --- Controls: nothing unusual.
# ---------------------------------------------------------------------------------------


class PlainNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@animal()
class Plain(Animal):
    net = PlainNet


class NarrowNet(Net):
    def __init__(self) -> None:
        super().__init__(6)
        self.first = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x))


@animal()
class Narrow(Animal):
    """Of four FSDP2 ranks, the last holds no row of any parameter."""

    net = NarrowNet


@animal(plain=reported("dropout"))
class Dropout(Animal):
    net = staticmethod(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)))


@animal(plain=reported("BatchNorm"), grain=rejected("BatchNorm"))
class WithBatchNorm(Animal):
    net = staticmethod(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))


@animal()
class GroupNorm(Animal):
    net = staticmethod(lambda: nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)))


# --- Routing: parameters that only some samples use.
# ------------------------------------------------------------------


class ExpertsNet(Net):
    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)) -> None:
        super().__init__()
        self.experts = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        out = x.clone()
        for number, expert in enumerate(self.experts):
            if (mine := route == number).any():
                out[mine] = out[mine] + expert(x[mine])
        return self.head(out)


@animal(*FIND)
class Experts(Animal):
    inputs = ("x", "route")
    net = ExpertsNet


@animal(ddp=late("find_unused_parameters"), ddp_grain=late("find_unused_parameters"))
class ExpertsUnannounced(Experts):
    """DDP needs a setting for it."""


SKIPPED = late("FSDP2", "unit")


@animal(*FIND, fsdp2=SKIPPED, fsdp2_grain=SKIPPED)
class ExpertBlocks(Experts):
    """Each expert is an FSDP2 unit, which a rank may skip."""

    net = staticmethod(lambda: ExpertsNet(Layer))


class StackedExpertsNet(Net):
    """All experts in one parameter that is always used; each sample selects one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 8, 8) * 0.3)

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        return self.head(torch.einsum("bi,bio->bo", x, self.experts.index_select(0, route)))


@animal()
class StackedExperts(Experts):
    net = StackedExpertsNet


class AdaptersNet(Net):
    """Two adapters of the same sizes; micro-batches with a rare sample also use the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.adapters = nn.ModuleDict(
            {name: nn.Linear(8, 8, bias=False) for name in ("usual", "rare")}
        )

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:
        h = self.base(x)
        for name, mask in (("usual", ~rare), ("rare", rare)):
            if mask.any():
                h = h + self.adapters[name](x) * mask[:, None]
        return self.head(torch.tanh(h))


@animal(*FIND)
class Adapters(Animal):
    inputs = ("x", "rare")
    net = AdaptersNet


class OneAdapterNet(AdaptersNet):
    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        return super().forward(x, route % 2 == 0)


@animal(*FIND, micro=1)
class OneAdapter(Animal):
    """A micro-batch is one sample, which uses one of two adapters, so all ranks have equally many
    gradients."""

    inputs = ("x", "route")
    net = OneAdapterNet


class TowerNet(PlainNet):
    """A micro-batch without rare samples skips the second layer."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(), layer()])

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:
        h = self.layers[0](x)
        if rare.any():
            h = h + self.layers[1](x) * rare[:, None]
        return self.head(h)


@animal(*FIND, fsdp2=SKIPPED, fsdp2_grain=SKIPPED)
class TowerBlock(Animal):
    inputs = ("x", "rare")
    net = TowerNet


@animal(*FIND)
class TowerInside(TowerBlock):
    """As above, inside FSDP2's only unit."""

    net = staticmethod(lambda: TowerNet(lambda: nn.Linear(8, 8)))


@animal(*FIND, micro=2)
class TowerForOneSample(TowerInside):
    """Only the first sample of the run uses the layer: the preflight check does, and the last
    micro-batch does not."""

    FIRST = 38

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"], batch["index"] == self.FIRST)


@animal(*FIND, micro=2)
class TowerInSmallBatches(TowerInside):
    """In many micro-batches and some steps no rank uses the layer; a micro-batch before the last
    may use it."""


@animal(*FIND, *ADAMW)
class TowerByAdamW(TowerInside):
    """Without rare samples the gradient is None and AdamW leaves the parameter unchanged; zeros
    would move it."""


class RepeatedNet(PlainNet):
    """The second layer is called once per rare sample of the micro-batch, and once more."""

    def forward(self, x: Tensor, rare: Tensor) -> Tensor:
        h = self.layers[1](self.layers[0](x))
        for number in rare.nonzero().flatten().tolist():
            only = F.one_hot(torch.tensor(number), len(x)).to(x)
            h = h + self.layers[1](x) * only[:, None]
        return self.head(h)


@animal(fsdp2=EQUAL + SKIPPED, fsdp2_grain=EQUAL + SKIPPED)
class BlockCalledOften(TowerBlock):
    """Ranks call an FSDP2 unit a different number of times."""

    net = RepeatedNet


class TopKNet(Net):
    def __init__(self, layer: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList([layer() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = self.gate(x).topk(2, dim=1)
        share, out = best.softmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * share[rows, place][:, None])
        return self.head(out)


@animal(*FIND)
class TopK(Animal):
    """A mixture of experts with top-2 routing."""

    net = TopKNet


@animal(*FIND, fsdp2=EQUAL + SKIPPED, fsdp2_grain=SKIPPED)
class TopKBlocks(Animal):
    net = staticmethod(lambda: TopKNet(Layer))


class LateNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, used: bool) -> Tensor:
        h = self.base(x)
        return self.head(h + self.late(x) if used else h)


class Late(Animal):
    net = LateNet
    progress: Any = None

    def used(self) -> bool:
        raise NotImplementedError

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"], self.used())


@animal(*FIND, *ADAMW)
class UsedLater(Late):
    """No rank uses a layer in the first three steps."""

    def used(self) -> bool:
        return self.progress is not None and self.progress.step >= 3


@animal(*FIND, *ADAMW)
class UsedEarly(Late):
    """No rank uses a layer from the fifth step on."""

    def used(self) -> bool:
        return self.progress is None or self.progress.step < 4


@animal(ddp=late("find_unused_parameters"), ddp_grain=late("find_unused_parameters"))
class UsedEarlyUnannounced(UsedEarly):
    """DDP would wait for the gradient of the unused layer."""


@animal(
    ddp=rejected("late", "find_unused_parameters"),
    ddp_grain=rejected("late", "find_unused_parameters"),
)
class NeverUsed(Late):
    def used(self) -> bool:
        return False


@animal(*FIND, *ADAMW)
class NeverUsedAnnounced(NeverUsed):
    pass


# --- Parameters of unusual kinds.
# -------------------------------------------------------------------------------------


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.last = nn.Linear(16, 3)

    def forward(self, token: Tensor) -> Tensor:
        return self.last(self.head(torch.tanh(self.embedding(token).mean(1))))


@animal()
class Tied(Animal):
    inputs = ("token",)
    net = TiedNet


class TiedLayersNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner.weight = self.layers[0].inner.weight


@animal(
    fsdp2=EQUAL + rejected("FSDP", "inner.weight"),
    fsdp2_grain=EQUAL + rejected("FSDP", "inner.weight"),
)
class TiedLayers(Animal):
    """One parameter in two FSDP2 units."""

    net = TiedLayersNet


class MatrixNet(Net):
    """A head after a matrix."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.size(1))
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ self.weight))


@animal(fsdp2=rejected("weight", "FSDP2"), fsdp2_grain=rejected("weight", "FSDP2"))
class Transposed(Animal):
    net = staticmethod(lambda: MatrixNet(torch.randn(4, 8).t()))


@animal(all=rejected("weight", "gaps"))
class Strided(Animal):
    """Every other column of a larger matrix, which torch's fused optimizers update wrongly on a
    CPU. It is float64 from the start, since a conversion would make it dense."""

    net = staticmethod(lambda: MatrixNet(torch.randn(8, 8, dtype=torch.float64)[:, ::2]).double())


@animal(all=rejected("weight"))
class Expanded(Animal):
    """A column expanded to four: memory holds it once, and no optimizer can update it."""

    net = staticmethod(lambda: MatrixNet(torch.randn(8, 1).expand(8, 4)))


@animal(fsdp2=rejected("0.weight", "FSDP2"), fsdp2_grain=rejected("0.weight", "FSDP2"))
class ChannelsLast(Animal):
    inputs = ("picture",)
    net = staticmethod(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)).to(
            memory_format=torch.channels_last
        )
    )


@animal()
class ChannelsLastData(Animal):
    """A contiguous convolution on channels-last images."""

    inputs = ("picture",)
    net = staticmethod(
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    )

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["picture"].contiguous(memory_format=torch.channels_last))


class ScalarNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@animal()
class Scalar(Animal):
    net = ScalarNet


class EmptyNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


@animal(fsdp2=EQUAL + rejected("nothing"), fsdp2_grain=EQUAL + rejected("nothing"))
class Empty(Animal):
    """A parameter with 0 elements."""

    net = EmptyNet


class ComplexNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex128) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(self.weight.dtype) @ self.weight).abs())


@animal(all=rejected("complex"))
class Complex(Animal):
    """Run files cannot hold complex128; tests/helpers/silent_cases.py trains complex64."""

    net = ComplexNet


class ListedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(8, 8) * 0.3 for _ in range(2)])
        self.vectors = nn.ParameterDict({"first": torch.randn(8), "second": torch.randn(8)})

    def forward(self, x: Tensor) -> Tensor:
        for matrix, vector in zip(self.matrices, self.vectors.values(), strict=True):
            x = torch.tanh(x @ matrix + vector)
        return self.head(x)


@animal()
class Listed(Animal):
    """ParameterList and ParameterDict."""

    net = ListedNet


def _half_frozen() -> nn.Module:
    model = PlainNet()
    model.layers[0].requires_grad_(False)
    model.head.bias.requires_grad_(False)
    return model


@animal()
class HalfFrozen(Animal):
    net = staticmethod(_half_frozen)


class FrozenLaterNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 12:
            self.layers[0].requires_grad_(False)
        return super().forward(x)


@animal(plain=late("layers.0") + reported("layers.0"), grain=late("layers.0"))
class FrozenLater(Animal):
    """A layer that is frozen in the middle of the run, after a number of forwards."""

    net = FrozenLaterNet


class NoBiasNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8, elementwise_affine=False)
        self.register_parameter("shift", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(x))
        return self.head(h if self.shift is None else h + self.shift)


@animal()
class NoBias(Animal):
    net = NoBiasNet


# --- Hooks.
# --------------------------------------------------------------------------------------------------


def _hooked(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = PlainNet()
    model.layers[0].inner.weight.register_hook(change)
    return model


HOOKED = rejected("layers.0.inner.weight", "hook")


@animal(fsdp2=HOOKED, fsdp2_grain=HOOKED)
class WeightHook(Animal):
    """Halve the gradient of one weight: linear, so any micro-batch size gives the same sum."""

    net = staticmethod(lambda: _hooked(lambda gradient: gradient * 0.5))


@animal(plain=HOOKED + reported("hook"), fsdp2=HOOKED, fsdp2_grain=HOOKED)
class WeightHookClamp(Animal):
    """Clamp the gradient of each micro-batch: another micro-batch size gives another sum."""

    net = staticmethod(lambda: _hooked(lambda gradient: gradient.clamp(-0.02, 0.02)))


def _halved(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _accumulated() -> nn.Module:
    model = PlainNet()
    model.layers[0].inner.weight.register_post_accumulate_grad_hook(_halved)
    return model


@animal(all=HOOKED + reported("hook"), grain=EQUAL + HOOKED, fsdp2=HOOKED, fsdp2_grain=HOOKED)
class PostAccumulateHook(Animal):
    """Halve the accumulated gradient: depends on the number of micro-batches."""

    net = staticmethod(_accumulated)


class ActivationHookNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.head(self.layers[1](x))


@animal()
class ActivationHook(Animal):
    """Clamp the gradient of each sample's activations."""

    net = ActivationHookNet


def _with_module_hooks() -> nn.Module:
    model = PlainNet()
    model.layers[0].register_forward_pre_hook(lambda _, given: (given[0] * 1.5,))
    model.layers[1].register_forward_hook(lambda _, given, out: out + 0.1 * given[0])
    return model


@animal()
class ModuleHooks(Animal):
    net = staticmethod(_with_module_hooks)


def _with_backward_hooks() -> nn.Module:
    model = PlainNet()
    model.layers[1].register_full_backward_hook(lambda _, into, out: (into[0].clamp(-0.01, 0.01),))
    return model


@animal()
class ModuleBackwardHook(Animal):
    """Clamp the gradient of each sample at the output of a module."""

    net = staticmethod(_with_backward_hooks)


# --- Weights and buffers that change outside the optimizer.
# -----------------------------------------------------------


class MaxNormNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, max_norm=1.0)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.embedding(token).mean(1))


CHANGED_WEIGHT = late("weight", "forward")


@animal(
    all=CHANGED_WEIGHT,
    single=EQUAL + CHANGED_WEIGHT + reported("forward"),
    ddp=EQUAL + CHANGED_WEIGHT,
    single_grain=EQUAL + CHANGED_WEIGHT,
)
class MaxNorm(Animal):
    inputs = ("token",)
    net = MaxNormNet


class ChangedWeightNet(PlainNet):
    def change(self, weight: nn.Parameter) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.change(self.head.weight)
        return super().forward(x)


class NormalisedNet(ChangedWeightNet):
    @torch.no_grad()
    def change(self, weight: nn.Parameter) -> None:
        weight.div_(weight.norm(dim=1, keepdim=True))


EITHER = EQUAL + CHANGED_WEIGHT + reported("forward")
"""where the change is the same however often it is made, and on every process"""


@animal(all=EITHER, grain=CHANGED_WEIGHT, single_grain=EITHER, fsdp2=CHANGED_WEIGHT)
class Normalised(Animal):
    """Normalise a weight in place."""

    net = NormalisedNet


class DataAssignedNet(ChangedWeightNet):
    def change(self, weight: nn.Parameter) -> None:
        weight.data = weight.data.clamp(-0.2, 0.2)


@animal(all=EITHER, grain=EQUAL + CHANGED_WEIGHT, fsdp2=CHANGED_WEIGHT, fsdp2_grain=CHANGED_WEIGHT)
class DataAssigned(Animal):
    """Replace a weight's ``.data``."""

    net = DataAssignedNet


class DataInPlaceNet(ChangedWeightNet):
    def change(self, weight: nn.Parameter) -> None:
        weight.data.clamp_(-0.2, 0.2)


@animal(all=EITHER, grain=EQUAL + CHANGED_WEIGHT, fsdp2=CHANGED_WEIGHT, fsdp2_grain=CHANGED_WEIGHT)
class DataInPlace(Animal):
    """Change a weight through ``.data``, which does not change its version counter."""

    net = DataInPlaceNet


class TeacherNet(PlainNet):
    """A frozen average of a layer that is updated at each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.layers[0].inner.weight, 0.1)
        return super().forward(x + 0.1 * self.teacher(x))


MOVED = late("teacher.weight|additive|DTensor")


@animal(all=MOVED + reported("teacher.weight"), grain=MOVED)
class Teacher(Animal):
    net = TeacherNet


class BufferNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.calls = 0

    def change(self, x: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.change(x)
        return super().forward(x - self.center)


BUFFER = late("center")
BUFFERS = {
    "plain": BUFFER + rejected("additive") + reported("center") + reported("buffer"),
    "grain": BUFFER,
}


class RunningAverageNet(BufferNet):
    def change(self, x: Tensor) -> None:
        self.center.lerp_(x.mean(0), 0.1)


@animal(**BUFFERS)
class RunningAverage(Animal):
    """A running average of the inputs that the forward uses: changes at every forward."""

    net = RunningAverageNet


class EverySixthNet(BufferNet):
    def change(self, x: Tensor) -> None:
        self.calls += 1
        if self.calls % 6 == 0:
            self.center.lerp_(x.mean(0), 0.1)


@animal(
    plain=BUFFERS["plain"],
    grain=BUFFER + rejected("additive") + stopped("model.calls"),
)
class EverySixth(Animal):
    """A buffer that changes at every sixth forward.

    Depending on the layout, that is in the preflight check, in a step, or in the repeat of a
    micro-batch, which names the number of calls.
    """

    net = EverySixthNet


class ReplacedBufferNet(BufferNet):
    def change(self, x: Tensor) -> None:
        self.center = self.center * 0.9 + x.mean(0) * 0.1


@animal(**BUFFERS)
class ReplacedBuffer(Animal):
    net = ReplacedBufferNet


class ReplacedLaterNet(BufferNet):
    def change(self, x: Tensor) -> None:
        self.calls += 1
        if self.calls % 6 == 0:
            self.center = self.center * 0.9 + x.mean(0) * 0.1


@animal(**BUFFERS)
class ReplacedLater(Animal):
    net = ReplacedLaterNet


class CountedNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.forwards += 1
        return super().forward(x)


@animal(
    plain=rejected("forwards") + reported("forwards") + reported("buffer"),
    grain=rejected("forwards"),
)
class Counted(Animal):
    """A buffer that counts forwards and is not read."""

    net = CountedNet


class OddBuffersNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.linspace(0, 1, 8, dtype=torch.float64))
        self.register_buffer("order", torch.tensor([7, 6, 5, 4, 3, 2, 1, 0]))
        self.register_buffer(
            "mask",
            torch.tensor([True, True, False, True, True, True, True, False]),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x[:, self.order] + self.wide.to(x)) * self.mask)


@animal()
class OddBuffers(Animal):
    """Buffers in float64, int64 and bool; one is non-persistent."""

    net = OddBuffersNet


# --- State that is neither parameter nor buffer.
# ----------------------------------------------------------------------

NOISE: dict[str, Expected] = {
    "plain": reported("twice|generator|resume") + rejected("twice|additive"),
    "grain": rejected("twice|additive|generator"),
}
"""two evaluations of the same samples differ; the loss of the whole is not the sum of its parts,
either"""
UNSEEN: dict[str, Expected] = {
    "plain": reported("twice|generator|resume"),
    "grain": rejected("twice|generator"),
}
"""two evaluations of the same samples differ, and nothing else shows it"""


class NoisyNet(PlainNet):
    def __init__(self) -> None:
        super().__init__()
        self.torch_generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.calls = 0
        self.memory: Tensor | None = None

    def noise(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * self.noise(x) if self.training else x)


class TorchGeneratorNet(NoisyNet):
    def noise(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.torch_generator, dtype=x.dtype)


@animal(**UNSEEN)
class OwnTorchGenerator(Animal):
    additive = False
    net = TorchGeneratorNet


class NumpyGeneratorNet(NoisyNet):
    def noise(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.numpy_generator.standard_normal(x.shape)).to(x)


@animal(**UNSEEN)
class OwnNumpyGenerator(Animal):
    additive = False
    net = NumpyGeneratorNet


class GlobalGeneratorNet(NoisyNet):
    def noise(self, x: Tensor) -> Tensor:
        return torch.randn_like(x) + torch.from_numpy(np.random.standard_normal(x.shape)).to(x)


@animal(plain=reported("random"))
class GlobalGenerators(Animal):
    """Draw from the global generators, which oneloop seeds."""

    net = GlobalGeneratorNet


class CounterNet(NoisyNet):
    def noise(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.ones_like(x) * (self.calls % 7)


@animal(**UNSEEN)
class PythonCounter(Animal):
    additive = False
    net = CounterNet


class MemoryNet(NoisyNet):
    def noise(self, x: Tensor) -> Tensor:
        before = x.mean(0) if self.memory is None else self.memory
        self.memory = before.lerp(x.detach().mean(0), 0.2)
        return before.expand_as(x)


@animal(**NOISE)
class Counter(Animal):
    """A Python counter, in a model whose loss should be a sum over samples."""

    net = CounterNet


@animal(**NOISE)
class Memory(Animal):
    """Keep a mean of the inputs so far in an attribute."""

    net = MemoryNet


class FadingSamples(Samples):
    """Samples that follow the progress of the run, which are loaded ahead."""

    def __init__(self, task: Any, count: int, seed: int) -> None:
        super().__init__(count, seed)
        self.task = task

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        step = self.task.progress.step if self.task.progress else 0
        return sample | {"x": sample["x"] * (1 - 0.05 * step)}


@animal()
class DataFollowsProgress(Plain):
    progress: Any = None

    def train_set(self) -> Any:
        return FadingSamples(self, 56, seed=1)

    def collate(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = super().collate(samples)
        return batch | {"y": batch["y"] * (1 + (self.progress.step if self.progress else 0))}


@animal("--machine.workers", "2")
class WorkersFollowProgress(DataFollowsProgress):
    pass


class OrderedSamples(Samples):
    def order(self, seed: int, batch: int) -> Any:
        """Return another order on each rank."""
        return Order(len(self), seed=int(os.environ.get("RANK", "0")))


@animal(
    ddp=rejected("the ranks differ", "order of the training set"),
    ddp_grain=rejected("the ranks differ", "order of the training set"),
    fsdp2=rejected("the ranks differ", "order of the training set"),
    fsdp2_grain=rejected("the ranks differ", "order of the training set"),
)
class OrderOfRank(Plain):
    def train_set(self) -> Any:
        return OrderedSamples(56, seed=1)


@animal(
    *("--optimizer.name", "odd_optimizers.SGLD"),
    grain=rejected("batch.grain", "cannot be combined with optimizer.name"),
    fsdp2=rejected("SGLD", "draws random numbers in step()"),
)
class NoiseInUpdates(Plain):
    pass


class NoisySamples(Samples):
    def __init__(self, count: int, seed: int, *, numpy: bool) -> None:
        super().__init__(count, seed)
        self.numpy = np.random.default_rng(5) if numpy else None
        self.torch = torch.Generator().manual_seed(5)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        noise = (
            torch.randn(8, generator=self.torch)
            if self.numpy is None
            else torch.tensor(self.numpy.normal(size=8))
        )
        return sample | {"x": sample["x"] + 0.1 * noise.to(sample["x"])}


@animal(**UNSEEN)
class DataWithTorchGenerator(Plain):
    def train_set(self) -> Any:
        return NoisySamples(56, seed=1, numpy=False)


@animal(**UNSEEN)
class DataWithNumpyGenerator(Plain):
    def train_set(self) -> Any:
        return NoisySamples(56, seed=1, numpy=True)


class OwnTrainingNet(PlainNet):
    """Switch its dropout off at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        self.drop.training = False
        return super().forward(self.drop(x))


@animal(plain=EQUAL + reported("dropout"))
class OwnTraining(Animal):
    net = OwnTrainingNet


class EvalNet(Net):
    """BatchNorm that stays in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.train()

    def train(self, mode: bool = True) -> EvalNet:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


@animal(plain=EQUAL + reported("BatchNorm"), grain=EQUAL + rejected("BatchNorm"))
class FrozenBatchNorm(Animal):
    net = EvalNet


# --- Autograd.
# --------------------------------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.01, 0.01)


class FunctionNet(PlainNet):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[1](self.function(self.layers[0](x))))


@animal()
class LinearFunction(Animal):
    """A custom autograd function that reverses the gradient."""

    net = staticmethod(lambda: FunctionNet(Reverse.apply))


@animal()
class ClampFunction(Animal):
    """A custom autograd function that clamps the gradient of each sample."""

    net = staticmethod(lambda: FunctionNet(Clamp.apply))


class CheckpointedNet(PlainNet):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        return self.head(checkpoint(self.layers[1], x, use_reentrant=self.reentrant))


@animal()
class CheckpointReentrant(Animal):
    net = staticmethod(lambda: CheckpointedNet(True))


@animal()
class CheckpointNonReentrant(Animal):
    net = staticmethod(lambda: CheckpointedNet(False))


class SparseNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, sparse=True)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.embedding(token).mean(1))


SPARSE = rejected("sparse", "embedding.weight")


@animal(all=SPARSE)
class Sparse(Animal):
    inputs = ("token",)
    net = SparseNet


class UsedTwiceNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers[0](x) + self.layers[1](x))


@animal()
class UsedTwice(Animal):
    net = UsedTwiceNet


class NestedNoGradNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aside = self.layers[0](x)
            with torch.set_grad_enabled(self.training):
                inside = self.layers[1](x)
        return super().forward(x + aside) + self.head(inside) - self.head(inside.detach()).detach()


@animal()
class NestedNoGrad(Animal):
    net = NestedNoGradNet


class InPlaceNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x) * 1.0
        h[:, :3].mul_(2.0)
        h.view(-1)[::2].add_(0.1)
        return self.head((self.layers[1](h) * 1.0).relu_())


@animal()
class InPlaceViews(Animal):
    net = InPlaceNet


class PenaltyNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        x = x.detach().requires_grad_()
        out = super().forward(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out + slope.square().sum(1, keepdim=True)


UNSUPPORTED = EQUAL + rejected("FSDP2 does not support")


@animal(fsdp2=UNSUPPORTED, fsdp2_grain=UNSUPPORTED)
class GradientPenalty(Animal):
    """Double backward: the gradient of the output with respect to the input is in the loss."""

    net = PenaltyNet


class FunctionalNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        swapped = {name: value * 1.1 for name, value in self.head.named_parameters()}
        for layer in self.layers:
            x = layer(x)
        return torch.func.functional_call(self.head, swapped, (x,))


@animal()
class FunctionalCall(Animal):
    net = FunctionalNet


# --- Layers of torch.
# -------------------------------------------------------------------------------------------------


@animal()
class WeightNorm(Animal):
    net = staticmethod(
        lambda: nn.Sequential(
            parametrizations.weight_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)
        )
    )


SPECTRAL = rejected("0.parametrizations")


@animal(
    plain=SPECTRAL + rejected("additive") + reported("0.parametrizations") + reported("buffer"),
    grain=SPECTRAL,
)
class SpectralNorm(Animal):
    """Change buffers by a power iteration at every forward in training."""

    net = staticmethod(
        lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 3)
        )
    )


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def _parametrized() -> nn.Module:
    model = PlainNet()
    parametrize.register_parametrization(model.layers[0].inner, "weight", Symmetric())
    return model


@animal()
class Parametrized(Animal):
    net = staticmethod(_parametrized)


class RecurrentNet(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 5)
        self.recurrent = kind(5, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, token: Tensor) -> Tensor:
        return self.head(self.recurrent(self.embedding(token))[0].mean(1))


@animal()
class RNN(Animal):
    inputs = ("token",)
    net = staticmethod(lambda: RecurrentNet(nn.RNN))


@animal()
class LSTM(RNN):
    net = staticmethod(lambda: RecurrentNet(nn.LSTM))


@animal()
class GRU(RNN):
    net = staticmethod(lambda: RecurrentNet(nn.GRU))


class AttentionNet(nn.Module):
    """Attention over the first ``length`` tokens of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, token: Tensor, length: Tensor) -> Tensor:
        outside = torch.arange(token.size(1)) >= length[:, None]
        h = self.embedding(token)
        mask = torch.zeros(outside.shape, dtype=h.dtype).masked_fill(outside, -torch.inf)
        h = h + self.attention(h, h, h, key_padding_mask=mask, need_weights=False)[0]
        return self.head(h.masked_fill(outside[..., None], 0.0).sum(1))


@animal()
class Attention(Animal):
    inputs = ("token", "length")
    net = AttentionNet


# --- Outputs of forwards, and inputs of losses.
# -----------------------------------------------------------------------


class NestedOutputNet(PlainNet):
    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.layers[0](x)
        return {"out": (self.head(self.layers[1](h)), [h]), "none": None}


@animal()
class NestedOutput(Animal):
    """A dict with a tuple, a list and None."""

    net = NestedOutputNet

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = model(batch["x"])
        return found["out"][0] + found["out"][1][0].mean(1, keepdim=True)


class Box:
    """Hide a tensor from torch."""

    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class BoxedLayer(Layer):
    def forward(self, x: Box) -> Box:
        return Box(super().forward(x.inside))


class BoxedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([BoxedLayer(), BoxedLayer()])

    def forward(self, x: Tensor) -> Tensor:
        box = Box(x)
        for layer in self.layers:
            box = layer(box)
        return self.head(box.inside)


@animal(fsdp2=UNSUPPORTED, fsdp2_grain=UNSUPPORTED)
class BoxedOutputs(Animal):
    """Blocks whose inputs and outputs are objects in which FSDP2 finds no tensor."""

    net = BoxedNet


@animal(fsdp2=UNSUPPORTED, fsdp2_grain=UNSUPPORTED)
class PenaltyInLoss(Plain):
    """The loss reads the parameters: an L2 term for each sample."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        total, outputs = super().loss(model, batch)
        return total + 0.01 * len(batch["x"]) * sum(
            p.square().sum() for p in model.parameters()
        ), outputs


@animal()
class Siamese(Plain):
    """Two forwards, one backward."""

    def output(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"]) - 0.5 * model(batch["x"].flip(1))


@animal()
class Ragged(Plain):
    """The weight of a sample is its length."""

    unit = "tokens"

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["length"].sum()

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        each = (self.output(model, batch) - batch["y"]).square().sum(1) * batch["length"]
        return each.sum(), {"loss": each.detach()}


@animal("--eval.micro", "2", "--eval.every", "5")
class ListMetrics(Plain):
    """Metrics that keep lists; with 17 validation samples, a rank may get none."""

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": Samples(17, seed=2)}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = self.output(model, batch)
        each = (out - batch["y"]).square().sum(1)
        return each.sum(), {"loss": each.detach(), "score": out[:, 0].detach().sigmoid()}

    def metrics(self) -> Any:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision

        return MetricCollection({"auroc": BinaryAUROC(), "precision": BinaryAveragePrecision()})

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: dict[str, Tensor]) -> None:
        metrics.update(outputs["score"], (batch["y"][:, 0] > 0).long())


if __name__ == "__main__":
    from zoo_outcomes import main

    main(sys.argv[1:])
