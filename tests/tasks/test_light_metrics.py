"""The packaged tasks' metrics equal torchmetrics' and closed forms on any number of ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from oneloop.task_protocol.evaluation_metrics import directions
from oneloop.tasks.class_counts import ClassCounts
from oneloop.tasks.light_metrics import Means, TextMeans
from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.evaluation",
    "oneloop.tools.report.examples",
    "oneloop.tasks.class_counts",
    "oneloop.tasks.light_metrics",
)

CLASSES, SAMPLES = 7, 131


def drawn() -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and targets; classes 2 and 6 never occur, classes 2 and 5 are never
    predicted."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[:, [2, 5]] = -9.0
    target = torch.randint(0, CLASSES - 2, (SAMPLES,), generator=generator)
    return logits, target + (target >= 2)


class Drawn:
    """A task whose samples are row numbers of the drawn logits."""

    def __init__(self, kind: str) -> None:
        self.kind, (self.logits, self.target) = kind, drawn()

    def collate(self, samples):
        return {"row": torch.tensor(samples)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["row"])))

    def loss(self, model, batch):
        logits = model(self.logits[batch["row"]])
        return logits.sum(), {"logits": logits.detach()}

    def metrics(self):
        if self.kind == "ours":
            return ClassCounts(CLASSES)
        from torchmetrics import MetricCollection
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassConfusionMatrix,
            MulticlassF1Score,
            MulticlassMatthewsCorrCoef,
        )

        return MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES, average="micro", validate_args=False),
                "macro_f1": MulticlassF1Score(CLASSES, validate_args=False),
                "matthews": MulticlassMatthewsCorrCoef(CLASSES, validate_args=False),
                "confusion": MulticlassConfusionMatrix(CLASSES, validate_args=False),
            }
        )

    def update(self, metrics, batch, outputs):
        metrics.update(outputs["logits"], self.target[batch["row"]])


def both() -> list[tuple[dict, list]]:
    """Return metrics and matrices of oneloop, torchmetrics and oneloop again: each evaluation
    starts at zero."""
    from oneloop.evaluation import evaluate
    from oneloop.launch.processes import start
    from oneloop.tools.report.examples import Examples

    world = start()
    model = world.prepare(nn.Sequential(nn.Identity(), Scaled()))
    results = []
    for kind in ("ours", "torchmetrics", "ours"):
        examples = Examples(0)
        task = Drawn(kind)
        metrics = evaluate(
            task,
            model,
            list(range(SAMPLES)),
            accelerator=world.accelerator,
            micro=16,
            examples=examples,
        )
        results.append((metrics, examples.matrices["confusion"]["counts"]))
    return results


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize(
    ("ranks", "config"),
    [(1, "single"), (3, "ddp"), pytest.param(2, "fsdp2", marks=pytest.mark.slow)],
)
def test_counts_are_those_of_torchmetrics(ranks, config):
    for ours, theirs, again in run(both, ranks=ranks, config=config).ok():
        assert ours[1] == theirs[1] == again[1] and sum(map(sum, ours[1])) == SAMPLES
        assert ours[0] == again[0] and ours[0].keys() == theirs[0].keys() == {
            "loss",
            "accuracy",
            "macro_f1",
            "matthews",
        }
        assert all(
            abs(ours[0][name] - theirs[0][name]) <= 1e-6 * abs(theirs[0][name]) for name in ours[0]
        )


def test_of_two_classes_the_second_has_its_f1_and_what_does_not_count_is_left_out():
    from torchmetrics.functional.classification import binary_f1_score, binary_matthews_corrcoef

    torch.manual_seed(0)
    logits, target = torch.randn(200, 2), torch.randint(-1, 2, (200,))
    counts = ClassCounts(2)
    for part in range(4):
        counts.update(logits[50 * part : 50 * part + 50], target[50 * part : 50 * part + 50])
    computed, known = counts.compute(), target >= 0
    predicted = logits.argmax(1)[known]
    assert computed["f1"] == pytest.approx(float(binary_f1_score(predicted, target[known])))
    assert computed["matthews"] == pytest.approx(
        float(binary_matthews_corrcoef(predicted, target[known])), abs=1e-6
    )
    assert int(computed["confusion"].sum()) == int(known.sum())


@pytest.mark.parametrize("classes", [3, 101])
def test_metrics_of_classes_are_those_of_a_closed_form_and_of_torchmetrics(classes):
    from torchmetrics.functional.classification import (
        multiclass_accuracy,
        multiclass_f1_score,
        multiclass_matthews_corrcoef,
    )

    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(500, classes, generator=generator)
    target = torch.randint(0, classes, (500,), generator=generator)
    logits[torch.arange(500), target] += 1.5
    counts = ClassCounts(classes, top=3)
    for rows in torch.arange(500).split(37):
        counts.update(logits[rows], target[rows])
    found = counts.compute()

    # By hand: Matthews' coefficient is the correlation of one-hot targets and predictions.
    predicted = logits.argmax(1)
    one_hot = [torch.eye(classes, dtype=torch.float64)[label] for label in (target, predicted)]
    of_target, of_prediction = (matrix - matrix.mean(0) for matrix in one_hot)
    covariance = (of_target * of_prediction).sum()
    spread = (of_target.square().sum() * of_prediction.square().sum()).sqrt()
    assert found["matthews"] == pytest.approx(float(covariance / spread), rel=1e-12)
    assert found["accuracy"] == float((predicted == target).double().mean())
    in_top = (logits.topk(3).indices == target[:, None]).any(1)
    assert found["top3_accuracy"] == float(in_top.double().mean())

    expected = {
        "accuracy": multiclass_accuracy(predicted, target, classes, average="micro"),
        "macro_f1": multiclass_f1_score(predicted, target, classes),
        "matthews": multiclass_matthews_corrcoef(predicted, target, classes),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), abs=1e-6), name


def test_many_classes_keep_no_matrix():
    counts = ClassCounts(101)
    counts.update(torch.eye(101), torch.arange(101).flip(0))
    computed = counts.compute()
    assert computed == {
        "accuracy": pytest.approx(1 / 101),
        "macro_f1": pytest.approx(1 / 101),
        "matthews": 0.0,
    }
    assert sum(tensor.numel() for tensor in counts.buffers()) == 3 * 101 + 1


def test_sums_of_text_are_perplexity_and_bits_per_byte():
    means = TextMeans({"perplexity": False, "accuracy": True, "bits_per_byte": False})
    for _ in range(2):
        nats, tokens = torch.tensor([math.log(2), 3 * math.log(2)]), torch.tensor([True, True])
        means.update(
            {
                "perplexity": (nats, tokens),
                "accuracy": (torch.tensor([True, False]), tokens),
                "bits_per_byte": (nats, torch.tensor([1, 3])),
            }
        )
    assert means.compute() == pytest.approx(
        {"perplexity": 4.0, "accuracy": 0.5, "bits_per_byte": 1.0}
    )


def test_a_mean_without_weight_is_no_number():
    means = Means({"first": None, "second": True})
    for values in ([True, False, False], [True]):
        exact = torch.tensor(values)
        means.update({"first": (exact, torch.ones_like(exact)), "second": (exact, exact & False)})
    assert means.compute() == pytest.approx({"first": 0.5, "second": math.nan}, nan_ok=True)


def test_directions_are_known_before_anything_is_measured():
    from torchmetrics import MeanMetric, MetricCollection

    class Task:
        def __init__(self, metrics) -> None:
            self.metrics = metrics

    assert directions(Task(lambda: ClassCounts(3))) == {
        "loss": False,
        "accuracy": True,
        "macro_f1": True,
        "matthews": True,
    }
    assert directions(Task(lambda: Means({"accuracy": True, "kl": None}))) == {
        "loss": False,
        "accuracy": True,
        "kl": None,
    }
    assert directions(Task(lambda: MetricCollection({"mean": MeanMetric()}))) == {
        "loss": False,
        "mean": None,
    }
    assert directions(object()) == {"loss": False}
    with pytest.raises(ValueError, match=r"metrics\(\) returned a list"):
        directions(Task(lambda: [1]))
