"""The gradient noise scale equals the known value of a closed-form problem on every parallel
layout."""

from __future__ import annotations

import html
import json
import math

import pytest
import torch
from torch import nn

from oneloop.measure.noise_scale import NoiseScale, Sensor
from oneloop.tools.report.advice import meaning
from tiny import Ragged
from worlds import each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.loop.upkeep",
    "oneloop.measure.noise_scale",
    "oneloop.optim.clip",
    "oneloop.tools.report.advice",
)

WIDTH, DISTANCE = 40, 2.0


class Point(nn.Module):
    """A unit of loss is |theta - x|^2 / 2 with x from N(0, 1): gradient theta + noise, tr(S) =
    WIDTH, |G|^2 = 4."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((WIDTH,), DISTANCE / math.sqrt(WIDTH)))

    def forward(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        return (0.5 * (self.theta - x).square().sum(-1) * own).sum()


def measured(accumulate: int, ragged: bool, each_batch: bool, scaled: bool, steps: int) -> float:
    """Return the noise scale of steps of 24 samples, in samples."""
    from oneloop.launch.processes import start
    from oneloop.optim.clip import global_norm

    started = start(sync_each_batch=each_batch)
    accelerator = started.accelerator
    accelerator.gradient_accumulation_steps = accumulate
    model = started.prepare(Point())
    if scaled:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    sensor, noise = Sensor(accelerator, model), NoiseScale(window=steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(7 + started.rank)
    samples = 24 // started.ranks // accumulate
    for _ in range(steps):
        lengths = [
            torch.randint(1, 6, (samples,), generator=generator)
            if ragged
            else torch.full((samples,), 3)
            for _ in range(accumulate)
        ]
        weight = float(started.total(torch.tensor(float(sum(int(one.sum()) for one in lengths)))))
        with sensor.measuring():
            for own in lengths:
                x = torch.randn(samples, 5, WIDTH, generator=generator)
                counts = (torch.arange(5) < own[:, None]).float()  # a sample is 1 to 5 units
                with accelerator.accumulate(model):
                    accelerator.backward(model(x, counts) * (started.ranks * accumulate / weight))
                sensor.micro_batch(float(own.sum()))
        if scaled:
            accelerator.scaler.unscale_(optimizer)
        norm = float(global_norm(model.parameters()))
        noise.add(*sensor.read(weight, 24), norm=norm)
        if scaled:
            accelerator.scaler.step(optimizer)
            accelerator.scaler.update()
        optimizer.zero_grad()
    return noise.value


@pytest.mark.parametrize(
    ("ranks", "config", "accumulate", "ragged", "each_batch", "scaled"),
    [
        (1, "single", 4, False, False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, "fsdp2", 1, False, False, False),
                (2, "ddp", 1, True, False, False),
                (1, "single", 4, True, False, True),
                (2, "ddp", 3, False, False, False),
                (2, "fsdp2", 3, True, False, False),
                (2, "fsdp2", 3, True, True, False),
            )
        ),
    ],
)
def test_the_known_value(ranks, config, accumulate, ragged, each_batch, scaled):
    # The slow cases are noisier.
    steps = 600 if ranks == 1 and not scaled else 1200
    world = run(measured, accumulate, ragged, each_batch, scaled, steps, ranks=ranks, config=config)
    # tr(S) / |G|^2 = 10 units of loss; a sample has 3 units on average.
    expected = WIDTH / DISTANCE**2 / 3
    for found in world.ok():
        assert abs(found / expected - 1) < 0.1


def test_a_run_logs_it_prints_it_and_keeps_it(tmp_path):
    words = [
        "digits",
        "--task.augment",
        "false",
        "--duration",
        "15",
        "--batch.micro",
        "16",
        "--log.every",
        "5",
        "--track",
        "none",
        "--eval.every",
        "0",
    ]
    one_micro_batch = ["--run.dir", "b", "--batch.micro", "64", "--duration", "5"]
    several = [[*words, "--run.dir", "a"], [*words, *one_micro_batch]]
    ((first, second),) = run(each_message, several, folder=tmp_path).ok()
    assert first[0] == second[0] == 0, (first, second)
    lines = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    *_, last = (line["train/noise_scale"] for line in lines if "train/noise_scale" in line)
    assert meaning(last, 64) in first[1]
    assert meaning(last, 64) in html.unescape((tmp_path / "a" / "report.html").read_text())

    # A step of one micro-batch has nothing to compare.
    assert "train/noise_scale" not in (tmp_path / "b" / "metrics.jsonl").read_text()
    assert "noise scale" not in second[1]


class Weightless(Ragged):
    """One sample has no target, so a rank may have nothing to measure in a step."""

    additive = False  # its weight depends on the other samples of the batch

    def collate(self, samples):
        batch = super().collate(samples)
        short = torch.tensor([len(sample) == 2 for sample in samples])
        batch["target"] = batch["target"].masked_fill(short[:, None] & ~short.all(), -100)
        return batch


def test_a_rank_without_weight_has_nothing_to_measure(tmp_path):
    (tmp_path / "r.yaml").write_text("task: test_noise_scale.Weightless\n")
    words = [
        "r.yaml",
        "--batch.size",
        "4",
        "--batch.micro",
        "2",
        "--duration",
        "30",
        "--log.every",
        "1",
        "--track",
        "none",
        "--eval.every",
        "0",
        "--run.dir",
        "a",
    ]
    run(train, words, ranks=2, config="ddp", folder=tmp_path).ok()


def test_a_norm_whose_square_overflows_is_no_measurement():
    noise = NoiseScale()
    noise.add(math.inf, 1 / 2, 1 / 8, norm=1e200)
    assert noise.value is None
    noise.add(3.0, 1 / 2, 1 / 8, norm=1.0)
    assert noise.value is not None


@pytest.mark.slow
def test_measuring_changes_nothing(tmp_path):
    from safetensors.torch import load_file

    for ranks, config in ((2, "ddp"), (2, "fsdp2")):
        for every in ("2", "100"):  # steps between log lines, which measure
            run(
                train,
                [
                    "digits",
                    "--duration",
                    "6",
                    "--batch.size",
                    "16",
                    "--batch.micro",
                    "4",
                    "--log.every",
                    every,
                    "--track",
                    "none",
                    "--task.width",
                    "8",
                    "--eval.every",
                    "0",
                    "--save.every",
                    "0",
                    "--run.dir",
                    f"{config}-{every}",
                ],
                ranks=ranks,
                config=config,
                folder=tmp_path,
            ).ok()
        often, rarely = (
            load_file(tmp_path / f"{config}-{every}" / "final" / "model.safetensors")
            for every in ("2", "100")
        )
        assert all(torch.equal(often[name], rarely[name]) for name in often)


@pytest.mark.parametrize(
    ("value", "batch", "expected_text"),
    [
        (900.0, 64, "critical batch about 900; you use 64: up to 14x larger"),
        (64.0, 64, "about right"),
        (100.0, 4096, "batches down to 1/41 of it would need fewer samples"),
    ],
)
def test_what_it_means(value, batch, expected_text):
    assert expected_text in meaning(value, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [["digits"], ["gpt", "--task.layers", "2", "--task.width", "64", "--task.block", "64"]],
)
def test_stable_over_micro_batch_sizes(tmp_path, recipe):
    found = []
    for micro in (4, 8, 16):
        words = [
            *recipe,
            "--duration",
            "300",
            "--batch.micro",
            str(micro),
            "--log.every",
            "2",
            "--track",
            "none",
            "--eval.every",
            "0",
            "--save.every",
            "0",
            "--run.dir",
            str(tmp_path / str(micro)),
        ]
        run(train, words, folder=tmp_path, timeout=600).ok()
        lines = [
            json.loads(line)
            for line in (tmp_path / str(micro) / "metrics.jsonl").read_text().splitlines()
        ]
        found.append(
            [line["train/noise_scale"] for line in lines if "train/noise_scale" in line][-1]
        )
    assert max(found) / min(found) < 1.5, found
