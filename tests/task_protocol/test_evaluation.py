"""Evaluation counts every sample exactly once on any number of ranks, and leaves the model
unchanged."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.evaluation",
    "oneloop.launch.before_imports",
    "oneloop.loop.evaluations",
    "oneloop.tasks.image_classification",
)

SIZES = (1, 7, 16, 33)
MICROS = (4, 16)


class Squares:
    """y = x; the loss of sample i is i squared, its weight i + 1."""

    def collate(self, samples):
        return {"x": torch.tensor(samples, dtype=torch.float32)[:, None]}

    def weight(self, batch):
        return (batch["x"] + 1).sum()

    def loss(self, model, batch):
        out = model(batch["x"])
        return out.square().sum(), {"seen": batch["x"][:, 0].detach()}

    def metrics(self):
        from torchmetrics import MetricCollection
        from torchmetrics.aggregation import CatMetric, SumMetric

        return MetricCollection({"count": SumMetric(), "each": CatMetric()}, compute_groups=False)

    def update(self, metrics, batch, outputs):
        metrics["count"].update(torch.ones_like(outputs["seen"]))
        metrics["each"].update(outputs["seen"])


class Same(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, x):
        return self.frozen(self.drop(x * self.scale))


def results() -> dict:
    from torch.distributed.fsdp import FSDPModule

    from oneloop.evaluation import evaluate
    from oneloop.launch.processes import start

    world = start()
    model = world.prepare(Same())
    found = {}
    for size in SIZES:
        for micro in MICROS:
            model.train()
            inner = model.module if hasattr(model, "module") else model
            inner.frozen.eval()
            found[size, micro] = evaluate(
                Squares(), model, list(range(size)), accelerator=world.accelerator, micro=micro
            )
            assert model.training and inner.drop.training and not inner.frozen.training
            if isinstance(model, FSDPModule):
                assert type(inner.scale).__name__ == "DTensor"  # sharded again
    assert (
        evaluate(
            Squares(),
            model,
            [1, 2],
            accelerator=world.accelerator,
            micro=1,
            interrupted=lambda: True,
        )
        is None
    )
    return found


class Centred(nn.Module):
    """Subtracts the mean seen in training; has buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 2))
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("mask", torch.tensor([False, True, False]))
        self.register_buffer("turn", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x):
        return self.norm(x) * self.scale[0, 0]


def with_statistics() -> dict:
    from oneloop.evaluation import evaluate
    from oneloop.launch.processes import start

    world = start()
    rank = world.accelerator.process_index
    model = world.prepare(Centred())
    for buffer in model.buffers():
        buffer += torch.tensor(rank).to(buffer.dtype)
    found = evaluate(Squares(), model, list(range(7)), accelerator=world.accelerator, micro=2)
    return {
        "loss": found["loss"],
        **{name.removeprefix("module."): own for name, own in model.named_buffers()},
    }


@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_the_statistics_of_rank_0_count(config):
    for found in run(with_statistics, ranks=2, config=config).ok():
        assert found["loss"] == pytest.approx(sum(i * i for i in range(7)) / 28 / (1 + 1e-5))
        assert found["norm.running_mean"] == 0 and found["norm.num_batches_tracked"] == 0
        assert found["mask"].tolist() == [False, True, False] and found["turn"].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        (3, "ddp"),
        (2, "fsdp2"),
    ],
)
def test_every_sample_counts_once(ranks, config):
    for found in run(results, ranks=ranks, config=config).ok():
        for size in SIZES:
            expected = sum(i * i for i in range(size)) / sum(i + 1 for i in range(size))
            for micro in MICROS:
                assert found[size, micro]["loss"] == pytest.approx(expected, rel=1e-12)
                assert found[size, micro]["count"] == size
                assert "each" not in found[size, micro] or size == 1


def classwise(argv: list[str], *, named: bool) -> None:
    """Train digits with the recall of each class as metric."""
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassRecall
    from torchmetrics.wrappers import ClasswiseWrapper

    from oneloop.tasks.image_classification import ImageClassification

    each = MulticlassRecall(10, average=None)
    metrics = MetricCollection(
        {"recall": ClasswiseWrapper(each, prefix="recall_") if named else each}
    )
    ImageClassification.metrics = lambda self: metrics.clone()
    train(argv)


@pytest.mark.parametrize(
    ("ranks", "config"), [(1, "single"), pytest.param(2, "ddp", marks=pytest.mark.slow)]
)
def test_a_metric_of_several_values_has_their_names_or_is_rejected(tmp_path, ranks, config):
    words = [
        "digits",
        "--duration",
        "6",
        "--task.width",
        "8",
        "--eval.best",
        "eval/recall_3",
        "--track",
        "none",
        "--run.dir",
        "a",
    ]
    rejected = run(
        partial(classwise, named=False), words, ranks=ranks, config=config, folder=tmp_path
    )
    assert rejected.codes == [2] * ranks and not (tmp_path / "a").exists()
    assert (
        "the metric 'recall' returns 10 values without names; wrap it in torchmetrics' "
        "ClasswiseWrapper" in rejected.output
    )
    run(partial(classwise, named=True), words, ranks=ranks, config=config, folder=tmp_path).ok()
    found = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    evaluations = [line for line in found if "eval/recall_3" in line]
    assert evaluations and all(
        f"eval/recall_{one}" in line for line in evaluations for one in range(10)
    )
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    # larger is better
    assert summary["best"]["value"] == max(line["eval/recall_3"] for line in evaluations)


def which_are_pinned(words: list[str]) -> list[bool]:
    """Train, and return for each evaluation whether its batches would be pinned on CUDA."""
    from oneloop import evaluation
    from oneloop.launch import before_imports
    from oneloop.train import main

    asked: list[bool] = []
    load = evaluation.loader

    def loader(*args, **options):
        asked.append(options["pinned"])
        return load(*args, **options)

    evaluation.loader = loader
    before_imports.report(words)
    with pytest.raises(SystemExit):
        main(words)
    return asked


@pytest.mark.parametrize("pinned", [True, False])
def test_batches_are_pinned_as_in_training(tmp_path, pinned):
    (tmp_path / "r.yaml").write_text("task: tiny.Ragged\n")
    words = ["r.yaml", "--duration", "2", "--track", "none", "--run.dir", "a"]
    words += ["--machine.pinned", str(pinned).lower()]
    [asked] = run(which_are_pinned, words, folder=tmp_path).ok()
    assert asked and set(asked) == {pinned}
