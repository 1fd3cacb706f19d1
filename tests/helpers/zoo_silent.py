"""Models, losses and data sets whose differences between parallel layouts no check saw: what moves
late, through another door, or outside of a forward.

Each has its expected outcome, as in zoo.py. The kinds: A, a tensor changes behind its version
counter, or appears during the run; C, parameters that change outside of an FSDP2 unit, and models
that differ between processes. zoo_silent_state.py and zoo_silent_sums.py have the others, and
silent_values.py has G and E. ``python tests/helpers/zoo_silent.py [NAMES]`` prints a table of all,
as zoo.py does.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zoo import (
    EQUAL,
    Animal,
    Entry,
    Expected,
    Layer,
    Net,
    Plain,
    PlainNet,
    animal,
    rejected,
    reported,
    stopped,
)

SILENT: dict[str, Entry] = {}
LATE = ("--duration", "16")
"""long enough for a change in the 9th forward, also with one forward per step"""
LONG = ("--duration", "24")
"""long enough for several repeats of a micro-batch"""
EVALUATED = ("--duration", "16", "--eval.every", "3")
AGAIN = "again|repeat|same samples|same micro-batch"
"""what a message on a repeat contains"""
ANY: Expected = (("reported", ()),)
"""whatever one process trains"""


def silent(kind: str, *words: str, wide: bool = False, **expected: Any):
    """Register a task class; see :func:`zoo.animal`."""
    return animal(*words, into=SILENT, kind=kind, wide=wide, **expected)


def buffer(name: str) -> dict[str, Expected]:
    """Expect one line that names a moving buffer, or with the grain a stop."""
    return {"plain": reported(name), "grain": stopped(name)}


def parameter(name: str) -> dict[str, Expected]:
    """Expect a stop that names a changed parameter; one process without the grain reports it."""
    return {"all": stopped(name), "single": reported(name) + stopped(name)}


def clamped(name: str) -> dict[str, Expected]:
    """As ``parameter``, for a change that is the same on every layout."""
    return {"all": EQUAL + stopped(name), "single": EQUAL + reported(name) + stopped(name)}


def state(*words: str) -> dict[str, Expected]:
    """Expect a line that says what differs when a micro-batch is computed again.

    One process is not wrong by itself; with the grain it may also stop.
    """
    again = (AGAIN, *words)
    return {
        "plain": reported(*again) + stopped(*again),
        "grain": stopped(*again),
        "single": EQUAL + reported(*again) + stopped(*again),
        "single_grain": EQUAL + stopped(*again),
    }


# --- A. A tensor changes behind its version counter, or is registered during the run.
# -----------------------------------------------------------------------------------


class LateNet(PlainNet):
    """Change the buffer ``center`` in each forward of training from the 9th on."""

    FIRST = 9

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(8))
        self.calls = 0

    def change(self, x: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls >= self.FIRST:
            with torch.no_grad():
                self.change(x.detach())
        return super().forward(x - self.center)


class RevivedNet(LateNet):
    """A VQ codebook; every seventh forward replaces a code that no sample uses."""

    FIRST = 7

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.randn(6, 8))

    def change(self, x: Tensor) -> None:
        if self.calls % 7 == 0:
            self.codebook.data[self.calls % 6] = x[0]

    def forward(self, x: Tensor) -> Tensor:
        h = x + 0.1 * self.layers[0](x)
        code = self.codebook[torch.cdist(h, self.codebook).argmin(1)]
        return super().forward(h + (code - h).detach())


@silent("A", *LATE, wide=True, **buffer("codebook"))
class RevivedCodes(Animal):
    net = RevivedNet


class ByNumpyNet(LateNet):
    def change(self, x: Tensor) -> None:
        self.center.numpy()[:] = 0.9 * self.center.numpy() + 0.1 * x.numpy().mean(0)


@silent("A", *LATE, **buffer("center"))
class WrittenByNumpy(Animal):
    net = ByNumpyNet


class BySetNet(LateNet):
    def change(self, x: Tensor) -> None:
        self.center.set_(self.center.lerp(x.mean(0), 0.1))


@silent("A", *LATE, **buffer("center"))
class WrittenBySet(Animal):
    net = BySetNet


class ByDataNet(LateNet):
    def change(self, x: Tensor) -> None:
        self.center.data = self.center.data.lerp(x.mean(0), 0.1)


@silent("A", *LATE, **buffer("center"))
class AssignedData(Animal):
    net = ByDataNet


class RegisteredNet(LateNet):
    """A buffer that exists from the 9th forward on."""

    def change(self, x: Tensor) -> None:
        if self.calls == self.FIRST:
            self.register_buffer("newcomer", torch.zeros(8, dtype=x.dtype))
        self.newcomer = 0.8 * self.newcomer + 0.2 * x.mean(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - getattr(self, "newcomer", 0.0))


@silent("A", *LATE, wide=True, **buffer("newcomer"))
class RegisteredLate(Animal):
    net = RegisteredNet


class ShrinkingNet(LateNet):
    def change(self, x: Tensor) -> None:
        self.head.weight.data.mul_(0.97)


@silent("A", *LATE, **parameter("head.weight"))
class ShrinkingWeight(Animal):
    """A parameter that shrinks through ``.data`` from the 9th forward on."""

    net = ShrinkingNet


class SharedTableNet(LateNet):
    """A buffer that shares its memory with a numpy table, which the forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros(8)
        self.register_buffer("statistics", torch.from_numpy(self.table))

    def change(self, x: Tensor) -> None:
        shared = self.statistics.numpy()
        shared += 0.1 * (x.numpy().mean(0) - shared)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.statistics)


@silent("A", *LATE, **buffer("statistics"))
class SharedTable(Animal):
    net = SharedTableNet


class RollingNet(LateNet):
    """A ring of learned offsets that rolls: the same values in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rotated", torch.randn(8))

    def change(self, x: Tensor) -> None:
        self.rotated.data.copy_(self.rotated.roll(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.3 * self.rotated)


@silent("A", *LATE, **buffer("rotated"))
class RollingRing(Animal):
    """The sum of all values, and the exclusive or of all bits, never change."""

    net = RollingNet


class FlippedNet(RollingNet):
    def change(self, x: Tensor) -> None:
        self.rotated.data.neg_()


@silent("A", *LATE, **buffer("rotated"))
class FlippedSigns(Animal):
    """Eight signs flip at once: an even number, so that an exclusive or does not change."""

    net = FlippedNet


class DoubleBufferNet(LateNet):
    """Two buffers of one size, which are swapped by ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("front_half", torch.randn(8))
        self.register_buffer("back_half", torch.randn(8))

    def change(self, x: Tensor) -> None:
        self.front_half.data, self.back_half.data = self.back_half.data, self.front_half.data

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.3 * self.front_half)


@silent("A", *LATE, **buffer("front_half"))
class DoubleBuffer(Animal):
    """A sum of the hashes of all buffers does not change."""

    net = DoubleBufferNet


class CountsNet(LateNet):
    """Counts of visits in a non-persistent int64 buffer, which scale an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("visits", torch.ones(8, dtype=torch.int64), persistent=False)

    def change(self, x: Tensor) -> None:
        self.visits.data[x.mean(0).argmax()] += 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.visits.to(x).sqrt())


@silent("A", *LATE, **buffer("visits"))
class CountsByData(Animal):
    net = CountsNet


class OneUlpNet(LateNet):
    def change(self, x: Tensor) -> None:
        self.center.data.copy_(torch.nextafter(self.center, torch.ones_like(self.center)))


@silent("A", *LATE, plain=EQUAL + reported("center"), grain=stopped("center"))
class OneUlp(Animal):
    """A buffer that moves by the smallest step there is; bits differ, and nothing else."""

    net = OneUlpNet


class LateGainNet(LateNet):
    """A parameter that the 9th forward registers, with a value from its data (ActNorm)."""

    def change(self, x: Tensor) -> None:
        if self.calls == self.FIRST:
            self.actnorm = nn.Parameter(1 / (x.std(0) + 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * getattr(self, "actnorm", 1.0))


@silent("A", *LATE, **parameter("actnorm"))
class RegisteredParameter(Animal):
    net = LateGainNet


class RemovedNet(LateNet):
    """An offset for the warm-up, which the 9th forward removes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("warm_offset", torch.full((8,), 0.5), persistent=False)

    def change(self, x: Tensor) -> None:
        self.warm_offset = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.warm_offset is None else x + self.warm_offset)


@silent("A", *LATE, **buffer("warm_offset"))
class RemovedBuffer(Animal):
    net = RemovedNet


class RenamedNet(LateNet):
    """A buffer that gets another name: the number of buffers stays the same."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("old_codes", torch.randn(8))

    def change(self, x: Tensor) -> None:
        if self.calls == self.FIRST:
            codes = self._buffers.pop("old_codes")
            self.register_buffer("new_codes", codes + x.mean(0))

    def forward(self, x: Tensor) -> Tensor:
        codes = self._buffers.get("old_codes", self._buffers.get("new_codes"))
        return super().forward(x + 0.3 * codes)


@silent("A", *LATE, **buffer("old_codes|new_codes"))
class RenamedBuffer(Animal):
    net = RenamedNet


class NewHeadNet(LateNet):
    """The 9th forward replaces the head: the number of modules stays the same."""

    def change(self, x: Tensor) -> None:
        if self.calls == self.FIRST:
            self.head = nn.Linear(8, 3).to(x)


@silent("A", *LATE, **parameter("head"))
class NewHead(Animal):
    net = NewHeadNet


class LargeNet(LateNet):
    """More than 1 MB of codes, which one forward initialises from its data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large_codes", torch.zeros(20_000, 8))

    def change(self, x: Tensor) -> None:
        if self.calls == self.FIRST:
            self.large_codes.data += 0.5 * x.mean(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.large_codes[7])


@silent("A", *LATE, wide=True, **buffer("large_codes"))
class LargeCodes(Animal):
    """They change in one step only, which need not be one of machine.check_every."""

    net = LargeNet


class LargeSignsNet(LateNet):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large_signs", torch.randn(20_000, 8))

    def change(self, x: Tensor) -> None:
        self.large_signs.data.neg_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.3 * self.large_signs[7])


@silent("A", *LATE, **buffer("large_signs"))
class LargeSigns(Animal):
    """Signs of float64 are the highest bits of 64: a sum modulo 2^64 of two of them is 0."""

    net = LargeSignsNet


# --- C. Parameters that change outside of an FSDP2 unit; models that differ between processes.
# --------------------------------------------------------------------------------------------------


class TargetNet(PlainNet):
    """BYOL: a target network, which is an average of the online one."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.ModuleList([Layer(), Layer()]).requires_grad_(False)

    @torch.no_grad()
    def update(self) -> None:
        for old, new in zip(self.target.parameters(), self.layers.parameters(), strict=True):
            old.lerp_(new.detach(), 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        with torch.no_grad():
            for layer in self.target:
                h = layer(h)
        return super().forward(x) + 0.5 * h[:, :3]


class UpdatedInForward(TargetNet):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.update()
        return super().forward(x)


@silent("C", wide=True, **parameter("target.0.inner"))
class BYOL(Animal):
    net = UpdatedInForward


@silent("C", **parameter("target.0.inner"))
class TargetInLoss(Animal):
    """The task keeps the model, and its loss updates the target."""

    def model(self) -> nn.Module:
        self.kept = TargetNet()
        return self.kept

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training:
            self.kept.update()
        return super().loss(model, batch)


@silent("C", **parameter("head.weight|layers.0.inner.weight"))
class DecayInLoss(Plain):
    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(0.99)
        return super().loss(model, batch)


@silent("C", **clamped("head.weight|layers.0.inner.weight"))
class ClippedInLoss(Plain):
    """A critic's weights are clipped before each loss (WGAN): the same on every layout."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if model.training:
            for weight in model.parameters():
                weight.data.clamp_(-0.2, 0.2)
        return super().loss(model, batch)


class ReplacedNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.head.weight = nn.Parameter(self.head.weight.detach() * 0.99)
        return super().forward(x)


@silent("C", wide=True, **parameter("head.weight"))
class ReplacedParameter(Animal):
    net = ReplacedNet


class TransposedNet(PlainNet):
    """Each forward registers a frozen square weight transposed, in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            transposed = self.mix.weight.detach().t()
            self.mix.weight = nn.Parameter(transposed, requires_grad=False)
        return self.mix(super().forward(x))


@silent("C", **parameter("mix.weight"))
class TransposedInForward(Animal):
    net = TransposedNet


class GrowingNet(PlainNet):
    """Progressive growing: the 9th forward adds a layer, which no optimizer knows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.training and self.calls == 9:
            grown = Layer().to(x)
            self.layers.append(grown)
        return super().forward(x)


@silent("C", *LATE, **parameter("layers.2.inner"))
class Growing(Animal):
    net = GrowingNet


class LateTieNet(PlainNet):
    """The first forward ties two layers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.layers[1].inner.weight is not self.layers[0].inner.weight:
            self.layers[1].inner.weight = self.layers[0].inner.weight
        return super().forward(x)


TIED = "layers.1.inner.weight|layers.0.inner.weight"


@silent(
    "C",
    all=stopped(TIED) + rejected("FSDP2"),
    single=stopped("replaced or tied") + reported(TIED),
)
class TiedInForward(Animal):
    net = LateTieNet


class NoisyWeightNet(PlainNet):
    """Add noise to a weight for the forward, and subtract it again: equal but for rounding."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        weight = self.layers[0].inner.weight
        noise = 0.1 * torch.randn(weight.shape, dtype=weight.dtype)
        weight.data.add_(noise)
        out = super().forward(x)
        weight.data.sub_(noise)
        return out


NOISY = "layers.0.inner.weight"


@silent(
    "C",
    plain=stopped(NOISY),
    single=reported(NOISY) + reported("random") + stopped(NOISY),
    grain=EQUAL + stopped(NOISY),
    fsdp2=stopped("layers.0.inner|DTensor"),
    fsdp2_grain=stopped("layers.0.inner|DTensor"),
)
class NoisyWeight(Animal):
    net = NoisyWeightNet


FEATURES = EQUAL + stopped("fourier")
"""numpy and Python are seeded before ``model()``, or the processes compare what it returns"""


class FeaturesNet(Net):
    """Random Fourier features, in one of several places."""

    def __init__(self, place: str, numbers: Any = np.random) -> None:
        super().__init__()
        features = torch.from_numpy(numbers.standard_normal((8, 8))).float()
        if place == "buffer":
            self.register_buffer("fourier", features)
        elif place == "attribute":
            self.fourier = features
        else:
            self.fourier = nn.Parameter(features, requires_grad=place == "trained")

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cos(x @ self.fourier.to(x)))


@silent("C", all=FEATURES)
class RandomAttribute(Animal):
    net = staticmethod(lambda: FeaturesNet("attribute"))


@silent("C", all=FEATURES)
class RandomBuffer(Animal):
    net = staticmethod(lambda: FeaturesNet("buffer"))


@silent("C", wide=True, all=FEATURES)
class RandomFrozen(Animal):
    net = staticmethod(lambda: FeaturesNet("frozen"))


@silent("C", all=FEATURES)
class RandomTrained(Animal):
    net = staticmethod(lambda: FeaturesNet("trained"))


class RandomDepthNet(PlainNet):
    """Python's generator chooses a constant of each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.depth_scales = [random.uniform(0.5, 1.5) for _ in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.depth_scales, strict=True):
            x = layer(scale * x)
        return self.head(x)


@silent("C", all=EQUAL + stopped("depth_scales"))
class RandomScales(Animal):
    net = RandomDepthNet


ENTROPY: dict[str, Any] = {"single": ANY, "single_grain": ANY}
"""numbers of the operating system: every process, and every run, has others"""


@silent("C", all=stopped("fourier"), **ENTROPY)
class EntropyBuffer(Animal):
    net = staticmethod(lambda: FeaturesNet("buffer", np.random.default_rng()))


@silent("C", all=stopped("fourier"), **ENTROPY)
class EntropyFrozen(Animal):
    net = staticmethod(lambda: FeaturesNet("frozen", np.random.default_rng()))


@silent(
    "C",
    plain=stopped("fourier") + reported(AGAIN, "loss|gradient|rank"),
    grain=stopped(f"fourier|{AGAIN}"),
    **ENTROPY,
)
class EntropyAttribute(Animal):
    net = staticmethod(lambda: FeaturesNet("attribute", np.random.default_rng()))


if __name__ == "__main__":
    from zoo_outcomes import main

    main(sys.argv[1:], silent=True)
