"""Programs of the shape of public ones give the losses and weights of their own plain loops."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file

import ports
from worlds import run, train

pytestmark = pytest.mark.covers()

STEPS, BATCH = 24, 8
COMMON = [
    *("--duration", str(STEPS), "--batch.size", str(BATCH), "--data.shuffle", "false"),
    *("--log.every", "1", "--track", "none", "--machine.workers", "0", "--optimizer.clip", "0"),
    *("--run.dir", "run"),
]


def nanogpts_rate(step: int) -> float:
    """The get_lr of nanoGPT: 5 steps of warm-up, decay until step 20, then a tenth."""
    if step < 5:
        return 6e-3 * (step + 1) / 6
    if step > 20:
        return 6e-4
    return 6e-4 + 0.5 * (1 + math.cos(math.pi * (step - 5) / 15)) * 5.4e-3


def nanogpts_optimizer(model):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.95))


PORTS = {
    "NanoGPT": (
        [
            *("--optimizer.lr", "6e-3", "--optimizer.betas", "[0.9,0.95]"),
            *("--optimizer.weight_decay", "0.1", "--optimizer.clip", "1.0"),
            *("--schedule.name", "cosine", "--schedule.warmup", "5", "--schedule.final", "0.1"),
            *("--schedule.warmup_offset", "1", "--schedule.length", "20", "--batch.micro", "4"),
        ],
        nanogpts_optimizer,
    ),
    "VAE": (["--optimizer.lr", "1e-2"], lambda m: torch.optim.Adam(m.parameters(), lr=1e-2)),
    "LSTM": (
        [
            *("--optimizer.name", "sgd", "--optimizer.lr", "0.05", "--optimizer.momentum", "0.9"),
            *("--schedule.name", "torch.optim.lr_scheduler.StepLR", "--schedule.step_size", "10"),
            *("--optimizer.clip", "0.25"),
        ],
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    ),
    "Siamese": (
        [
            *("--optimizer.name", "torch.optim.Adadelta", "--optimizer.lr", "1.0"),
            *("--schedule.name", "torch.optim.lr_scheduler.ExponentialLR"),
            *("--schedule.gamma", "0.9"),
        ],
        lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0),
    ),
    "Diffusion": (
        [
            *("--optimizer.lr", "2e-3", "--optimizer.betas", "[0.9,0.99]"),
            *("--ema.decay", "0.8", "--ema.start", "4", "--ema.warmup_power", "0.6666666666666666"),
            *("--ema.buffers", "true"),
        ],
        lambda m: torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.9, 0.99)),
    ),
}
RATES = {
    "NanoGPT": nanogpts_rate,
    "LSTM": lambda step: 0.05 * 0.1 ** (step // 10),
    "Siamese": lambda step: 0.9**step,
}
CLIPS = {"NanoGPT": 1.0, "LSTM": 0.25}


def plain(name: str):
    """Train in a plain loop; return the losses, the weights, and the EMA of ema-pytorch's rule."""
    from oneloop.basics.seeds import key

    torch.manual_seed(key(0))
    task = getattr(ports, name)()
    model = task.model()
    optimizer = PORTS[name][1](model)
    samples = task.train_set()
    average, losses = copy.deepcopy(model), []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = RATES[name](step) if name in RATES else group["lr"]
        chosen = [samples[(step * BATCH + n) % len(samples)] for n in range(BATCH)]
        batch = task.collate(chosen)
        optimizer.zero_grad()
        loss = model(batch) / task.weight(batch)
        loss.backward()
        if name in CLIPS:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPS[name])
        optimizer.step()
        losses.append(loss.item())

        # ema-pytorch: copies of the first updates, then a decay that grows to 0.8.
        since = max(step - 4, 0)
        decay = min(0.8, 1 - (1 + since) ** -(2 / 3)) if since else 0.0
        own = model.state_dict()
        for key_, value in average.state_dict().items():
            if value.is_floating_point():
                value.lerp_(own[key_], 1 - decay)
    return losses, model.state_dict(), average.state_dict()


def apart(found: dict, expected: dict) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    largest = 0.0
    for name, tensor in found.items():
        if not tensor.is_floating_point():  # BatchNorm's count is not averaged
            continue
        other = expected[name].double()
        scale = float(other.abs().max()) + 1e-9
        largest = max(largest, float((tensor.double() - other).abs().max()) / scale)
    return largest


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, "single"), pytest.param(2, "ddp", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", PORTS)
def test_a_port_is_its_plain_loop(tmp_path, name, ranks, config):
    if name == "Diffusion" and ranks > 1:
        pytest.skip("its BatchNorm sees the samples of one process")
    words = ["--task", f"ports.{name}", *COMMON, *PORTS[name][0]]
    run(train, words, ranks=ranks, config=config, folder=tmp_path).ok()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["train/loss"] for line in lines if "train/loss" in line]
    expected, weights, average = plain(name)
    assert losses == pytest.approx(expected, rel=2e-6)
    assert losses[-1] != pytest.approx(losses[0], rel=0.01)  # it moves
    assert apart(load_file(tmp_path / "run/final/model.safetensors"), weights) < 1e-5
    if name == "Diffusion":
        assert apart(load_file(tmp_path / "run/final/ema.safetensors"), average) < 1e-5
