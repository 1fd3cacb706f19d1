"""Several models and optimizers by name, such as those of a GAN, are saved and loaded as a whole."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.tensors import named, optimizer_tensors, together
from oneloop.checkpoint.checkpoints import Checkpoints
from oneloop.checkpoint.manifest import header, read_manifest
from oneloop.checkpoint.moved_buffers import MovedBuffers
from oneloop.checkpoint.resume import RunState
from oneloop.checkpoint.state_dict import buffers_of, model_tensors
from oneloop.ema import EMA
from slow_cases import with_slow
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensors",
    "oneloop.checkpoint.checkpoints",
    "oneloop.checkpoint.moved_buffers",
    "oneloop.checkpoint.resume",
    "oneloop.checkpoint.state_dict",
)


class Generator(nn.Module):
    """Has statistics of BatchNorm, and a buffer that differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.total += x.detach().sum()
        return self.layers(x)


class Count:
    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Gan:
    """A loop of one's own: two models, two optimizers, two EMAs.

    Args:
        seed: of the initial weights.
        way: accelerate ``prepare``s each model with its optimizer, or ``plain``: torch's own
            ``fully_shard`` and optimizers, or no wrapper.
        turned: name the discriminator first.
    """

    def __init__(self, seed: int, way: str = "plain", *, turned: bool = False) -> None:
        torch.manual_seed(seed)
        self.accelerator = accelerator()
        self.g = Generator()
        self.d = nn.Sequential(nn.Linear(2, 4), nn.LeakyReLU(), nn.Linear(4, 1))
        if way == "plain" and self.accelerator.num_processes > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (self.accelerator.num_processes,))
            fully_shard(self.g, mesh=mesh)
            fully_shard(self.d, mesh=mesh)
        self.optimizer_g = torch.optim.AdamW(self.g.parameters(), lr=0.05)
        self.optimizer_d = torch.optim.SGD(self.d.parameters(), lr=0.05, momentum=0.9)
        if way == "prepare":
            self.g, self.optimizer_g = self.accelerator.prepare(self.g, self.optimizer_g)
            self.d, self.optimizer_d = self.accelerator.prepare(self.d, self.optimizer_d)
        self.emas = [
            EMA(self.g, 64, buffers=True, name="smooth"),
            EMA(self.d, 64, name="discriminator"),
        ]
        self.count = Count()
        models = {"generator": self.g, "discriminator": self.d}
        optimizers = {"generator": self.optimizer_g, "discriminator": self.optimizer_d}
        if turned:
            models = dict(reversed(models.items()))
            optimizers = dict(reversed(optimizers.items()))
        self.state = RunState(
            models,
            optimizers,
            emas=self.emas,
            parts={"count": self.count, "smooth": self.emas[0], "discriminator": self.emas[1]},
            moved=MovedBuffers(models),
        )

    def step(self) -> None:
        seed = 100 * self.count.step + self.accelerator.process_index
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        for optimizer, sign in ((self.optimizer_d, 1), (self.optimizer_g, -1)):
            self.accelerator.backward(sign * self.d(self.g(x)).square().mean())
            optimizer.step()
            self.optimizer_d.zero_grad()
            self.optimizer_g.zero_grad()
        for ema in self.emas:
            ema.update(4)
        self.count.step += 1

    def everything(self) -> dict[str, torch.Tensor]:
        """Return copies of all tensors, whole, and counters."""
        found = model_tensors(self.state.model)
        found |= optimizer_tensors(self.state.model, self.state.optimizer)
        for ema in self.emas:
            found |= ema.tensors()
            found[f"seen {ema.name}"] = torch.tensor(ema.seen)
        found["step"] = torch.tensor(self.count.step)
        return {name: whole(tensor) for name, tensor in found.items()}

    @property
    def total(self) -> float:
        return float(together({"g": self.g}).get_buffer("g.total"))


def accelerator() -> Accelerator:
    from oneloop.launch.processes import start

    return start().accelerator


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


def leg(root: str, seed: int, way: str):
    """Resume if there is a checkpoint; return what was loaded, and what is saved then."""
    gan = Gan(seed, way, turned=seed % 2 == 1)
    checkpoints = Checkpoints(Path(root), gan.accelerator, sync=True)
    gan.state.resume(checkpoints, "auto", say=lambda line: None)
    loaded = (gan.everything(), gan.total)
    for _ in range(2):
        gan.step()
    gan.state.save(checkpoints, gan.count.step)
    saved = (gan.everything(), gan.total)
    gan.step()
    return loaded, saved, gan.everything()


LAYOUTS = [("fsdp2", 2, "plain"), ("single", 1, "plain"), ("ddp", 2, "prepare")]
LAYOUTS += [("fsdp2", 2, "prepare"), ("single", 1, "prepare"), ("fsdp2", 2, "plain")]


@pytest.mark.parametrize("layouts", with_slow([LAYOUTS[:3], LAYOUTS[2:]], [LAYOUTS[2:]]))
def test_every_layout_loads_what_another_saved(tmp_path, layouts):
    before = None
    for seed, (config, ranks, way) in enumerate(layouts):
        results = run(leg, str(tmp_path), seed, way, ranks=ranks, config=config).ok()
        for loaded, _, _ in results:
            if before is not None:
                same_but_statistics(loaded[0], before)
        before = results[0][1][0]
    moments = [name for name in before if name.startswith("optimizer.")]
    assert "optimizer.generator.layers.0.weight.exp_avg" in moments
    assert "optimizer.discriminator.0.weight.momentum_buffer" in moments
    assert before["step"] == 2 * len(layouts)


def same_but_statistics(loaded, expected) -> None:
    """Compare; what the ranks update on their own is that of rank 0."""
    same(loaded, expected)


@pytest.mark.parametrize(
    ("config", "ranks", "way"),
    with_slow([LAYOUTS[2], LAYOUTS[3]], [LAYOUTS[3]]),
)
def test_each_rank_gets_its_own_buffers_and_trains_on_as_before(tmp_path, config, ranks, way):
    run(leg, str(tmp_path), 1, way, ranks=ranks, config=config).ok()
    first = run(leg, str(tmp_path), 2, way, ranks=ranks, config=config).ok()
    assert first[0][0][1] != first[1][0][1] and first[0][0][1] != 0
