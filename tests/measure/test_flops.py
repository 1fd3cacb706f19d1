"""Throughput and time metrics: checked by hand, by formula, and with code that is slow on
purpose."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode

from oneloop.launch.processes import start
from oneloop.measure.flops import Operations, data_sheet, peak_flops
from oneloop.measure.meter import Meter
from oneloop.measure.update_ratio import UpdateRatio
from oneloop.tasks.causal_lm import CausalLM
from oneloop.tools.plan.ledger import Ledger
from oneloop.tools.report.advice import sentences
from oneloop.tools.run_reader import read_record
from tiny import Ragged, Sequences, training_flops
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.measure.clock",
    "oneloop.measure.flops",
    "oneloop.measure.meter",
    "oneloop.measure.update_ratio",
    "oneloop.show.metrics_file",
    "oneloop.tasks.causal_lm",
    "oneloop.tools.plan.ledger",
    "oneloop.tools.report.advice",
)

TEXT = str(ROOT / "docs" / "reference" / "data.md")


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_counted_operations_are_the_formula(architecture):
    layers, width, block = 4, 256, 128
    task = CausalLM(
        data=TEXT, layers=layers, width=width, heads=4, block=block, architecture=architecture
    )
    batch = task.collate([task.train_set()[i] for i in range(2)])
    outside = ("wte", "wpe", "embed")
    matrices = sum(
        p.numel()
        for n, p in task.model().named_parameters()
        if p.ndim == 2 and not any(o in n for o in outside)
    )
    if architecture == "gpt2":
        matrices += 257 * width  # tied to the input embedding, but counted as output layer
    formula = 6 * matrices + 12 * layers * width * block  # per token: 6 N + 12 L d T
    assert abs(training_flops(task.model(), task.loss, batch) / (2 * block) / formula - 1) < 0.03


def test_products_in_place_and_packed_rows_are_counted():
    with Operations() as counted:
        torch.zeros(3, 5).addmm_(torch.ones(3, 4), torch.ones(4, 5))
    assert counted.total == 2 * 3 * 4 * 5
    with Operations() as counted:
        torch.zeros(2, 3, 5).baddbmm_(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert counted.total == 2 * 2 * 3 * 4 * 5
    starts = torch.tensor([0, 3, 8, 16], dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True), Operations() as counted:
        query = torch.zeros(16, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        output = varlen_attn(query, query, query, starts, starts, 8, 8)
        forward = counted.total
        output.sum().backward()
    assert forward == 4 * 16 * 8 * 2 * 8 and counted.total == 3.5 * forward


@pytest.mark.parametrize(
    ("kernel", "width", "given"),
    [
        ("flash_attention", 16, (0.0, True)),
        ("flash_attention_for_cpu", 16, (0.0, True)),
        ("efficient_attention", 24, (None, True, 0.0, True)),
        ("cudnn_attention", 24, (None, True, 0.0, True)),
    ],
)
def test_attention_with_shared_key_heads_counts_as_with_repeated_ones(kernel, width, given):
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")

    def counts(counter, heads: int, total) -> list[float]:
        def made(heads: int, positions: int, width: int) -> torch.Tensor:
            shape = (2, heads, positions, width)
            return torch.zeros(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

        with counter:
            query, key, value = made(4, 32, 16), made(heads, 40, 16), made(heads, 40, width)
            output = operator(query, key, value, *given)[0]
            forward = total()
            output.sum().backward()
        return [forward, total()]

    # Compare with torch's own formulas, which know the kernel of a CPU since torch 2.15.
    formula = 2 * 32 * 40 * 2 * 4 * (16 + width)
    expected = [formula, formula * 7 / 2]
    if kernel != "flash_attention_for_cpu":
        twin = FlopCounterMode(display=False)
        expected = counts(twin, 4, twin.get_total_flops)
        assert expected[0] == formula

    # The efficient kernel always gets repeated heads.
    for heads in (4,) if kernel == "efficient_attention" else (4, 2, 1):
        operations = Operations()
        ledger = Ledger()
        assert counts(operations, heads, partial(getattr, operations, "total")) == expected
        assert counts(ledger, heads, ledger.operations.total) == expected


def test_resnet18_has_its_known_count():
    from torchvision import models

    batch = {"x": torch.zeros(2, 3, 224, 224)}
    found = (
        training_flops(models.resnet18(), lambda model, batch: (model(batch["x"]).sum(), {}), batch)
        / 2
    )
    # 1.814 G multiply-adds forward, and twice as many backward, except for the input of the first
    # layer.
    assert abs(found / (2 * (3 * 1.814e9 - 0.118e9)) - 1) < 0.03


@pytest.mark.parametrize(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 3090", 71),
        ("AMD Instinct MI300X", 1307),
        # no entry: measured, never another card's number
        ("NVIDIA T400 4GB", None),
        ("NVIDIA B300 SXM6 AC", None),
        ("NVIDIA GB300", None),
        ("NVIDIA H20", None),
        ("NVIDIA H800", None),
        ("NVIDIA A10", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA RTX PRO 4000 Blackwell", None),
        ("NVIDIA L40G", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("GRID A100-1-5C", None),
        ("", None),
    ],
)
def test_a_device_gets_its_own_peak_or_none(name, bfloat16):
    peaks = data_sheet(name)
    assert peaks.get(torch.bfloat16) == (bfloat16 and bfloat16 * 1e12)
    assert bool(peaks) is (bfloat16 is not None)


def test_tf32_has_its_own_peak():
    v100 = data_sheet("Tesla V100-SXM2-16GB")
    assert (v100[torch.float16], data_sheet("Tesla V100-PCIE-32GB")[torch.float16]) == (
        125e12,
        112e12,
    )
    before = torch.get_float32_matmul_precision()
    try:
        for precision, of_h100 in (("highest", 67e12), ("high", 494e12), ("medium", 494e12)):
            torch.set_float32_matmul_precision(precision)
            assert data_sheet("NVIDIA H100 80GB HBM3")[torch.float32] == of_h100
            assert data_sheet("Tesla T4")[torch.float32] == 8.1e12  # it has no TF32
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu"), torch.float32) == 0.0


NAP = 0.008
SPENT: list[float] = []
"""measured seconds of each slow call; on a busy machine they exceed the requested sleep"""


class SlowToLoad(Ragged):
    def train_set(self):
        return Napping(37, seed=1)


class Napping(Sequences):
    def __getitem__(self, index):
        began = time.perf_counter()
        time.sleep(NAP)
        sample = super().__getitem__(index)
        SPENT.append(time.perf_counter() - began)
        return sample


class SlowSGD(torch.optim.SGD):
    def step(self, closure=None):
        began = time.perf_counter()
        time.sleep(8 * NAP)
        result = super().step(closure)
        SPENT.append(time.perf_counter() - began)
        return result


def spent(argv: list[str]) -> list[float]:
    """Train, and return the seconds of each slow call."""
    with pytest.raises(SystemExit):
        train(argv)
    return SPENT


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


COMMON = [
    "--batch.size",
    "8",
    "--duration",
    "60",
    "--log.every",
    "20",
    "--eval.every",
    "0",
    "--save.every",
    "0",
    "--track",
    "none",
    "--run.dir",
    "a",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "phase", "calls", "before", "expected_text"),
    [
        (["--task", "test_flops.SlowToLoad"], "share/data", 8, 4, "the device waits for data"),
        (
            ["--optimizer.name", "test_flops.SlowSGD"],
            "share/update",
            1,
            0,
            "goes into the optimizer's update",
        ),
    ],
)
def test_what_is_slow_is_named_with_its_share(tmp_path, words, phase, calls, before, expected_text):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    taken = run(spent, ["r.yaml", *words, *COMMON], folder=tmp_path).ok()[0][before:]
    for number, line in enumerate(lines(tmp_path / "a")[:3]):
        shares = {name: value for name, value in line.items() if name.startswith("share/")}
        assert (
            abs(sum(shares.values()) - 1) < 1e-6
            and max(shares, key=lambda name: shares[name]) == phase
        )
        # within 5 points of the measured time of the slow calls; the first 20 steps include start-
        # up work
        if number:
            seconds = 160 / line["train/samples_per_second"]
            assert (
                abs(
                    line[phase]
                    - sum(taken[20 * calls * number : 20 * calls * (number + 1)]) / seconds
                )
                < 0.05
            )
    (sentence,) = sentences(read_record(tmp_path / "a"))
    assert expected_text in sentence and ": " not in sentence  # too short a run for advice


def test_a_slow_start_is_no_wait_for_data(tmp_path):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = ["r.yaml", *COMMON[:-4], "--track", "tensorboard", "--run.dir", "a"]
    run(SlowStart(), words, folder=tmp_path).ok()
    assert lines(tmp_path / "a")[0]["train/samples_per_second"] > 160 / 2.0


class SlowStart:
    """Make the tracker take two seconds to start."""

    def __call__(self, argv: list[str]) -> None:
        from accelerate.tracking import TensorBoardTracker

        ordinary = TensorBoardTracker.start

        def start(tracker):
            time.sleep(2.0)
            ordinary(tracker)

        TensorBoardTracker.start = start
        train(argv)


def measured() -> dict[str, float]:
    """Return the metrics of a step whose update is a tenth of the weights; with FSDP2 only rank 0
    has weights."""
    world = start()
    torch.manual_seed(0)
    model = world.prepare(torch.nn.Linear(4, 1, bias=False))
    meter = Meter(world.accelerator, list(model.parameters()))
    for number in range(3):
        meter.step(
            loss=torch.tensor(1.0 + number + 10 * world.rank),
            weight=2.0,
            samples=2,
            norm=torch.tensor(0.5),
        )
    meter.before_update()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    kept = meter.state_dict()
    meter.load_state_dict(kept)
    return meter.read()


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, "single"), pytest.param(2, "ddp", marks=pytest.mark.slow), (2, "fsdp2")],
)
def test_the_update_is_measured_where_a_rank_holds_no_weights(ranks, config):
    for metrics in run(measured, ranks=ranks, config=config).ok():
        assert metrics["train/update_ratio"] == pytest.approx(0.1, rel=1e-5)
        assert (
            metrics["train/loss"] == (6.0 if ranks == 1 else 6.0 + 36.0) / 6.0
            and metrics["train/grad_norm"] == 0.5
        )


def test_the_update_of_a_large_model_is_that_of_all_its_weights():
    torch.manual_seed(0)
    large = [
        torch.randn(400, 300) * 0.02,
        torch.ones(300),
        torch.zeros(300),
        torch.randn(50, 50) * 0.02,
        torch.ones(50),
    ] * 4
    parameters = [one.clone() for one in large]
    ratio = UpdateRatio(parameters)
    ratio.before()
    before = torch.cat([one.flatten() for one in parameters])
    for one in parameters:
        one += 1e-3 * torch.randn_like(one)
    moved, size = ratio.values(torch.zeros(()))
    change = torch.cat([one.flatten() for one in parameters]) - before
    assert float((moved / size).sqrt()) == pytest.approx(
        float(change.norm() / before.norm()), rel=0.05
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_update_of_any_layout_and_type(dtype):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(8, 16, 3), torch.nn.Conv1d(4, 4, 1), torch.nn.Linear(7, 1)
    ).to(dtype)
    model[0].to(memory_format=torch.channels_last)
    parameters = [one.detach() for one in model.parameters()]
    ratio = UpdateRatio(parameters)
    ratio.before()
    before = torch.cat([one.flatten() for one in parameters]).double()
    for one in parameters:
        one *= 1 - 2**-7
    moved, size = ratio.values(torch.zeros(()))
    change = torch.cat([one.flatten() for one in parameters]).double() - before
    # all weights count: the model is small
    assert float(size) == pytest.approx(float(before.norm() ** 2), rel=1e-6)
    assert float(moved) == pytest.approx(
        float(change.norm() ** 2), rel=1e-6 if dtype != torch.bfloat16 else 1e-5
    )


def test_a_resume_in_mid_window_counts_its_own_samples_only():
    """The loss covers the whole window, the speed only the time since the resume."""
    accelerator = start().accelerator
    first, second = Meter(accelerator), Meter(accelerator)
    for _ in range(90):
        first.step(loss=torch.tensor(2.0), weight=1.0, samples=10, norm=torch.tensor(1.0))
    second.load_state_dict(first.state_dict())
    began = time.perf_counter()
    for _ in range(10):
        second.step(loss=torch.tensor(1.0), weight=1.0, samples=10, norm=torch.tensor(1.0))
    time.sleep(0.2)
    metrics = second.read()
    assert metrics["train/loss"] == 1.9
    assert metrics["train/samples_per_second"] == pytest.approx(
        100 / (time.perf_counter() - began), rel=0.1
    )


def test_tokens_per_second_by_hand(tmp_path):
    (tmp_path / "r.yaml").write_text("task: {name: test_flops.SlowToLoad}\n")
    run(train, ["r.yaml", *COMMON], folder=tmp_path).ok()
    first, second = lines(tmp_path / "a")[:2]
    assert first["train/epoch"] == 160 / 37 and second["train/epoch"] == 320 / 37
    by_hand = (second["tokens"] - first["tokens"]) / (second["time"] - first["time"])
    # same interval, except for the logging itself
    assert abs(second["speed/tokens_per_second"] / by_hand - 1) < 0.05
    assert (
        abs(second["train/samples_per_second"] / (160 / (second["time"] - first["time"])) - 1)
        < 0.05
    )


@dataclass
class Raising:
    """Make TensorBoard's tracker raise at every call, or at every call after its start."""

    start: bool

    def __call__(self, argv: list[str]) -> None:
        from accelerate.tracking import TensorBoardTracker
        from torch.utils.tensorboard.writer import FileWriter

        def fail(*_, **__):
            raise ConnectionError("no tracker today")

        TensorBoardTracker.log = TensorBoardTracker.store_init_configuration = (
            TensorBoardTracker.finish
        ) = fail
        TensorBoardTracker.log_images = FileWriter.add_summary = FileWriter.add_graph = fail
        if self.start:
            TensorBoardTracker.start = fail
        train(argv)


class Breaks(Ragged):
    """In the first run, raise or kill the process after 47 calls of the loss."""

    losses = 0

    def loss(self, model, batch):
        self.losses += 1
        if self.losses > 47 and not Path("broken").exists():
            Path("broken").touch()
            if Path("kill").exists():
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no more of this")
        return super().loss(model, batch)


@pytest.mark.parametrize("end", ["error", "kill"])
def test_what_was_logged_before_an_error_or_a_checkpoint_is_in_tensorboard(tmp_path, end):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "r.yaml").write_text("task: {name: test_flops.Breaks}\n")
    (tmp_path / end).touch()
    words = [
        "r.yaml",
        *COMMON[:-4],
        "--track",
        "tensorboard",
        "--run.dir",
        "a",
        "--log.every",
        "5",
        "--save.every",
        "20",
    ]

    def in_tensorboard():
        (folder,) = (tmp_path / "a" / "tensorboard").iterdir()
        return [
            (one.step, one.value)
            for one in EventAccumulator(str(folder)).Reload().Scalars("train/loss")
        ]

    def in_metrics():
        return [
            (line["step"], pytest.approx(line["train/loss"], rel=1e-6))
            for line in lines(tmp_path / "a")
            if "train/loss" in line
        ]

    assert run(train, words, folder=tmp_path, watch=False).codes == [
        1 if end == "error" else -signal.SIGKILL
    ]
    assert in_tensorboard() == (
        in_metrics() if end == "error" else in_metrics()[: len(in_tensorboard())]
    )
    assert len(in_tensorboard()) >= (8 if end == "error" else 4)
    run(train, words, folder=tmp_path).ok()
    assert in_tensorboard() == in_metrics() and len(in_metrics()) == 12


class FullDisk:
    """Limit files to 600 bytes while metrics.jsonl is written; other processes are not limited."""

    def __call__(self, argv: list[str]) -> None:
        from oneloop.show.metrics_file import Lines

        ordinary = Lines.append

        def append(lines, line):
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, limits[1]))
            try:
                ordinary(lines, line)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)

        Lines.append = append
        train(argv)


@pytest.mark.parametrize(
    ("how", "track", "expected_text"),
    [
        (
            Raising(start=False),
            "tensorboard",
            "tracker tensorboard cannot be written (ConnectionError: no tracker today)",
        ),
        (
            Raising(start=True),
            "tensorboard",
            "tracker tensorboard cannot be written (ConnectionError: no tracker today)",
        ),
        (FullDisk(), "none", "metrics.jsonl cannot be written (OSError"),
    ],
)
def test_an_error_of_what_is_written_is_reported_once(tmp_path, how, track, expected_text):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    world = run(
        how,
        ["r.yaml", *COMMON[:-4], "--track", track, "--run.dir", "a", "--log.every", "10"],
        folder=tmp_path,
    )
    world.ok()
    assert world.output.count(expected_text) == world.output.count("cannot be written") == 1
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["step"] == 60
    assert all(isinstance(line, dict) for line in lines(tmp_path / "a"))  # no truncated line
