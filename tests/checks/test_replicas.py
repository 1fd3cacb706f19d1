"""Promise R11: the next check finds one flipped bit on one rank, and names the rank."""

from __future__ import annotations

import json

import pytest
import torch

from oneloop.basics.tensor_hash import tensor_hash
from tiny import Ragged
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.tensor_hash",
    "oneloop.loop.start_lines",
    "oneloop.checks.replicas",
)


class Flipping(Ragged):
    """Flip one bit of one rank's weights between the fifth step and the sixth."""

    def __init__(self, rank: int = 1, bit: int = 3, samples: int = 37) -> None:
        super().__init__(samples)
        self.rank, self.bit, self.calls = rank, bit, 0

    def loss(self, model, batch):
        self.calls += model.training
        self.trained = model
        return super().loss(model, batch)

    def collate(self, samples):
        import os

        # the samples of a step are collated while the one before it is pending
        if self.calls == 5 and int(os.environ.get("RANK", "0")) == self.rank:
            self.calls += 1
            weight = dict(self.trained.named_parameters())
            name = next(name for name in weight if name.endswith("inner.bias"))
            local = getattr(weight[name], "to_local", lambda: weight[name])()
            # in memory, where torch does not see it
            local.detach().numpy().view("int32")[2] ^= 1 << self.bit
        return super().collate(samples)


WORDS = [
    "--batch.size",
    "8",
    "--duration",
    "20",
    "--track",
    "none",
    "--eval.every",
    "0",
    "--machine.check_every",
    "3",
    "--optimizer.clip",
    "0",
    "--run.dir",
    "a",
]


@pytest.mark.parametrize(
    ("ranks", "config", "at"),
    [
        (2, "ddp", 1),
        pytest.param(3, "ddp", 0, marks=pytest.mark.slow),
        pytest.param(4, "hsdp", 3, marks=pytest.mark.slow),
    ],
)
def test_one_flipped_bit_is_found_and_named(tmp_path, ranks, config, at):
    (tmp_path / "r.yaml").write_text(f"task: {{name: test_replicas.Flipping, rank: {at}}}\n")
    size = ["--batch.size", "12"] if ranks == 3 else []
    world = run(train, ["r.yaml", *WORDS, *size], ranks=ranks, config=config, folder=tmp_path)
    assert set(world.codes) == {1}
    reason = json.loads((tmp_path / "a" / "summary.json").read_text())["exit_reason"]
    assert f"step 6: rank {at} differs from the others in inner.bias" in reason


def test_sound_replicas_continue_and_so_does_fsdp2_which_has_none(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    for ranks, config in ((2, "ddp"), (2, "fsdp2")):
        world = run(
            train,
            ["r.yaml", *WORDS[:-1], config, "--duration", "6", "--save.every", "0"],
            ranks=ranks,
            config=config,
            folder=tmp_path,
        )
        world.ok()


def test_every_bit_of_every_type_counts():
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        tensor = torch.randn(33).mul(8).to(kind)
        before = int(tensor_hash(tensor))
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        for bit in range(8 * tensor.element_size() - 1):
            flipped = tensor.clone()
            flipped.view(bits)[17] ^= 1 << bit
            assert int(tensor_hash(flipped)) != before, (kind, bit)


def test_the_order_of_elements_counts():
    tensor = torch.randn(40)
    hashes = {int(tensor_hash(tensor.roll(n))) for n in range(40)}
    assert len(hashes) == 40


def test_signs_of_two_elements_count():
    for kind in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        tensor = torch.arange(1, 41).to(kind)
        hashes = {int(tensor_hash(tensor))}
        for other in range(1, 40):
            flipped = tensor.clone()
            flipped[[0, other]] *= -1
            hashes.add(int(tensor_hash(flipped)))
        assert len(hashes) == 40, kind
