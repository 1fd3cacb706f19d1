"""Activation (gradient) checkpointing gives bit-identical gradients with much less memory, for any
model."""

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from oneloop.basics.exit_codes import Inexact
from oneloop.basics.seeds import other_states, reseed
from oneloop.machine import recompute as recomputation
from oneloop.machine.blocks import blocks, class_names
from oneloop.machine.recompute import recompute
from small_models import fresh, gradients
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.basics.seeds",
    "oneloop.machine.blocks",
    "oneloop.machine.recompute",
    "oneloop.tasks.causal_lm",
)


@pytest.mark.parametrize(
    ("mode", "saved"), [("full", 0.6), ("every:2", 0.3), ("every:5", 0.05), ("selective", 0.3)]
)
def test_the_same_gradients_and_less_kept(mode, saved):
    expected, usual = gradients(fresh())
    model = fresh()
    names = list(model.state_dict())
    recompute(model, mode)
    found, kept = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # The recomputed blocks keep their inputs themselves; the hooks do not see them.
    inputs = (
        0
        if mode == "selective"
        else (12 if mode == "full" else 12 // int(mode[-1])) * 2 * 24 * 32 * 4
    )
    assert kept + inputs < (1 - saved) * usual
    assert list(model.state_dict()) == names


class _Noisy(nn.Module):
    """Attention whose kernel draws random numbers, as those of a GPU do, and dropout after it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(attend_with_dropout(self.linear(inputs), 0.5), 0.5)


@torch.library.custom_op("oneloop_tests::attend_with_dropout", mutates_args=())
def attend_with_dropout(inputs: Tensor, dropout_p: float) -> Tensor:
    return inputs * (torch.rand_like(inputs) > dropout_p)


def _remember(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output != 0)


def _masked(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient * ctx.saved_tensors[0], None


attend_with_dropout.register_autograd(_masked, setup_context=_remember)


def test_selective_draws_the_same_numbers_again_if_attention_draws_some(monkeypatch):
    kept = {*recomputation._KEPT, "oneloop_tests.attend_with_dropout"}
    monkeypatch.setattr(recomputation, "_KEPT", kept)
    found = []
    for mode in ("none", "selective"):
        torch.manual_seed(0)
        model = nn.Sequential(*(_Noisy() for _ in range(3)))
        recompute(model, mode)
        model(torch.randn(4, 16)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_selective_keeps_attention_without_dropout():
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    policy = partial(recomputation._keeps, None)
    assert policy(flash, 1, 2, 3) is CheckpointPolicy.MUST_SAVE
    assert policy(flash, 1, 2, 3, 0.0, True) is CheckpointPolicy.MUST_SAVE
    assert policy(flash, 1, 2, 3, 0.1, True) is CheckpointPolicy.PREFER_RECOMPUTE
    assert policy(flash, 1, 2, 3, dropout_p=0.1) is CheckpointPolicy.PREFER_RECOMPUTE


def test_offloaded_inputs_give_the_same_gradients():
    expected, _ = gradients(fresh())
    model = fresh()
    recompute(model, "full", offload=True)
    found, _ = gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_blocks_are_found_in_anyones_model():
    from torchvision import models

    from oneloop.tasks.causal_lm import CausalLM

    assert class_names(blocks(fresh())) == ["Block"]
    assert (len(found := blocks(models.vit_b_16())), class_names(found)) == (12, ["EncoderBlock"])
    assert (len(found := blocks(models.resnet18())), class_names(found)) == (8, ["BasicBlock"])
    gpt = CausalLM(layers=3, data=__file__).model()
    assert (len(found := blocks(gpt)), class_names(found)) == (3, ["GPT2Block"])
    assert len(blocks(gpt, ["GPT2MLP"])) == 3
    with pytest.raises(ValueError, match="machine.blocks Blok: not in Transformer; it has Block"):
        blocks(fresh(), ["Blok"])
    resnet = models.resnet18()
    recompute(resnet, "full")
    resnet(torch.randn(2, 3, 32, 32)).sum().backward()


def test_what_cannot_be_recomputed_is_rejected():
    for bad in ("ful", "every", "every:0", "every:1.5", "budget:2", "full:3"):
        with pytest.raises(ValueError, match="recompute"):
            recompute(nn.Linear(2, 2), bad)
    with pytest.raises(ValueError, match="only 12 blocks"):
        recompute(fresh(), "every:13")
    with pytest.raises(ValueError, match="no repeated blocks"):
        recompute(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "full")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "config"), [(2, "ddp"), (2, "fsdp2")])
def test_a_run_is_the_same_to_the_bit(tmp_path, ranks, config):
    words = [
        "gpt",
        "--task.layers",
        "4",
        "--task.width",
        "16",
        "--task.block",
        "16",
        "--duration",
        "4",
        "--batch.size",
        "8",
        "--batch.micro",
        "2",
        "--track",
        "none",
        "--task.dropout",
        "0.1",
        "--debug.overfit",
        "16",
        "--eval.every",
        "0",
        "--save.every",
        "0",
        "--task.data",
        __file__,
    ]
    found = {}
    for mode in ("none", "full", "every:2", "selective"):
        folder = mode.replace(":", "-")
        world = run(
            train,
            [*words, "--machine.recompute", mode, "--run.dir", folder],
            ranks=ranks,
            config=config,
            folder=tmp_path,
        )
        world.ok()
        assert mode == "none" or f"recompute {mode}: " in world.output
        found[mode] = load_file(tmp_path / folder / "final" / "model.safetensors")
        assert all(torch.equal(found[mode][name], found["none"][name]) for name in found["none"])


# --- state of generators and buffers
# --------------------------------------------------------------------------------------------------

WIDTH = 6


class Layer(nn.Module):
    """A residual block; other kinds change its input or output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.changed(torch.tanh(self.linear(x)))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ByTorch(Layer):
    def changed(self, x):
        return x * (torch.rand(WIDTH) > 0.5)


class ByNumpy(Layer):
    def changed(self, x):
        return x * torch.from_numpy(np.random.rand(WIDTH) > 0.5)


class ByPython(Layer):
    def changed(self, x):
        return x * torch.tensor(random.gauss(1.0, 0.5))


class BatchNormed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def changed(self, x):
        return self.norm(x)


class InstanceNormed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)

    def changed(self, x):
        return self.norm(x.T[None])[0].T


class Renormed(nn.BatchNorm1d):
    """Reads its running mean in training, too."""

    def forward(self, x):
        return super().forward(x) + self.running_mean


class ByRenorm(BatchNormed):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Renormed(WIDTH)


class Replacing(Layer):
    """Puts a new tensor in the place of a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def changed(self, x):
        x = x * self.mean
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        return x


class InPlace(Replacing):
    def changed(self, x):
        x = x * self.mean.clone()
        self.mean.mul_(0.9)
        return x


KINDS = [ByTorch, ByNumpy, ByPython, BatchNormed, InstanceNormed, ByRenorm, Replacing]


def stack(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(kind() for _ in range(4)), nn.Linear(WIDTH, 1))


def passes(
    model: nn.Module, *, twice: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], object]:
    """Return gradients, buffers and states of generators after micro-batches, whose backward runs
    once or twice."""
    for number in range(3):
        reseed(torch.device("cpu"), 0, number, others=True)
        x = torch.randn(16, WIDTH)
        loss = model(x).square().sum()
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return gradients, [*model.buffers()], other_states()


@pytest.mark.parametrize("mode", ["full", "every:2", "selective", "offload"])
@pytest.mark.parametrize("kind", KINDS)
def test_random_numbers_and_buffers_are_those_without_recompute(kind, mode):
    plain = stack(kind)
    other = copy.deepcopy(plain)
    recompute(other, "full" if mode == "offload" else mode, offload=mode == "offload")
    twice = mode != "selective"  # which allows one backward
    expected, found = passes(plain, twice=twice), passes(other, twice=twice)
    for a, b in zip([*expected[0], *expected[1]], [*found[0], *found[1]], strict=True):
        assert torch.equal(a, b)
    assert found[2] == expected[2]
    assert list(other.state_dict()) == list(plain.state_dict())


def test_a_block_that_changes_a_buffer_in_place_is_rejected():
    model = stack(InPlace)
    recompute(model, "full")
    with pytest.raises(Inexact, match=r"changes the buffer 1\.mean in place"):
        model(torch.randn(4, WIDTH))
    with torch.no_grad():
        model(torch.randn(4, WIDTH))


class Task:
    """A stack of these blocks, also as a task."""

    def __init__(self, kinds: str) -> None:
        self.kinds = kinds.split("+")

    def model(self) -> nn.Module:
        mixed = [globals()[kind]() for kind in self.kinds]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *mixed, nn.Linear(WIDTH, 1))

    def train_set(self):
        return [*torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))]

    def eval_sets(self):
        return {}

    def collate(self, samples):
        return {"x": torch.stack(samples)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return model(batch["x"]).square().sum(), {}


def final(folder: Path, kinds: str, mode: str, *more: str, **world) -> dict[str, torch.Tensor]:
    words = ["digits", "--task", "test_recompute.Task", "--task.kinds", kinds, "--track", "none"]
    words += ["--duration", "4", "--batch.size", "8", "--batch.micro", "2", "--run.dir", mode]
    words += ["--machine.recompute", mode, "--machine.blocks", f"[{kinds.replace('+', ',')}]"]
    run(train, [*words, *more], folder=folder, **world).ok()
    return load_file(folder / mode / "final" / "model.safetensors")


@pytest.mark.parametrize(
    ("ranks", "config", "grain"),
    [
        (1, "single", []),
        pytest.param(2, "ddp", [], marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", [], marks=pytest.mark.slow),
        pytest.param(2, "ddp", ["--batch.grain", "2"], marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", ["--batch.grain", "2"], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_draws_is_the_same_to_the_bit(tmp_path, ranks, config, grain):
    # With batch.grain, no forward may change a buffer.
    kinds = "ByTorch+ByNumpy+ByPython"
    if not grain:
        kinds += "+BatchNormed+Replacing"
    found = []
    for mode in ("none", "full") if ranks == 1 else ("none", "full", "selective"):
        found.append(final(tmp_path, kinds, mode, *grain, ranks=ranks, config=config))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])


@pytest.mark.slow
def test_a_run_that_changes_a_buffer_in_place_is_rejected_before_it_begins(tmp_path):
    words = [
        "digits",
        "--task",
        "test_recompute.Task",
        "--task.kinds",
        "InPlace",
        "--run.dir",
        "run",
    ]
    words += ["--machine.recompute", "full", "--machine.blocks", "[InPlace]", "--track", "none"]
    world = run(train, words, folder=tmp_path)
    assert world.codes == [2] and "changes the buffer 1.mean in place" in world.output
    assert not (tmp_path / "run").exists()
