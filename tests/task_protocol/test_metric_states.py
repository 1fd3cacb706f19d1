"""Metrics over several ranks equal those of a plain loop over the micro-batches on one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric, RunningMean, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassRecall
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef, R2Score, SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP, RetrievalMRR
from torchmetrics.text import BLEUScore, CharErrorRate, EditDistance
from torchmetrics.wrappers import (
    BootStrapper,
    ClasswiseWrapper,
    MinMaxMetric,
    MultioutputWrapper,
    MultitaskWrapper,
    Running,
)

from worlds import run

pytestmark = pytest.mark.covers(
    "oneloop.evaluation",
    "oneloop.task_protocol.metric_states",
)

MICRO = 4
SIZES = (17, 3)  # ranks with different numbers of micro-batches, and a rank without one
WORDS = ["the cat sat", "a dog ran far", "the bird flew", "one fish", "the cat ran"]


class Listed(Metric):
    """Lists without a reduction (text metrics, detection mAP): tensors, and other values; some
    micro-batches append nothing."""

    def __init__(self):
        super().__init__()
        self.add_state("boxes", [], dist_reduce_fx=None)
        self.add_state("masks", [], dist_reduce_fx=None)

    def update(self, score, target):
        for one, right in zip(score, target, strict=True):
            if right:
                self.boxes.append(one[None].to(torch.int16 if right == 2 else torch.bfloat16))
                self.masks.append((int(right), b"mask"))

    def compute(self):
        value = torch.tensor(0.5)
        for box, (right, _) in zip(self.boxes, self.masks, strict=True):
            value = value * 0.9 + right * box.float().sum()
        return value


class Late(Metric):
    """A list that only the last micro-batch appends to."""

    def __init__(self):
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, index):
        if 16 in index:
            self.values.append(index.to(torch.int16))

    def compute(self):
        return torch.cat([*self.values, torch.zeros(1)]).sum()


class States(Metric):
    """States with other reductions: a mean, a concatenated tensor, a function, a half sum."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("joined", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("product", torch.tensor(1.0), dist_reduce_fx=lambda x: x.prod(0))
        self.add_state("half", torch.zeros((), dtype=torch.float16), dist_reduce_fx="sum")

    def update(self, score):
        self.mean = 0.5 * self.mean + score.mean()
        self.joined = torch.cat([self.joined, score])
        self.product = self.product * score.exp()[0]
        self.half += 1

    def compute(self):
        order = torch.arange(len(self.joined)) + 1.0
        return self.mean + (order * self.joined).sum() + self.product + self.half


class Hidden(Metric):
    """Keeps metrics in a plain list."""

    def __init__(self):
        super().__init__()
        self.inner = [Listed(), MeanMetric()]

    def update(self, score, target):
        self.inner[0].update(score, target)
        self.inner[1].update(score)

    def compute(self):
        return self.inner[0].compute() + self.inner[1].compute()


class Sums(Metric):
    """Sums of dtypes that a backend may not reduce."""

    def __init__(self):
        super().__init__()
        self.add_state("short", torch.zeros((), dtype=torch.int16), dist_reduce_fx="sum")
        self.add_state("turn", torch.zeros((), dtype=torch.complex64), dist_reduce_fx="sum")
        self.add_state("most", torch.zeros((), dtype=torch.bfloat16), dist_reduce_fx="max")

    def update(self, score):
        self.short += len(score)
        self.turn += torch.view_as_complex(torch.tensor([len(score), 2.0]))
        self.most = torch.maximum(self.most, score.max().bfloat16())

    def compute(self):
        return self.short + self.turn.abs() + self.most


SCORED = {  # get score and target
    "auroc": BinaryAUROC,
    "pearson": PearsonCorrCoef,
    "spearman": SpearmanCorrCoef,
    "mse": MeanSquaredError,
    "r2": R2Score,
    "minmax": lambda: MinMaxMetric(PearsonCorrCoef()),
    "sum": lambda: PearsonCorrCoef() + MeanSquaredError(),
    "listed": Listed,
    "hidden": Hidden,
    "boot": lambda: BootStrapper(MeanSquaredError(), num_bootstraps=3),
    "window": lambda: Running(MeanSquaredError(), window=2),
}
ALONE = {  # get the score only
    "mean": MeanMetric,
    "most": MaxMetric,
    "last": lambda: RunningMean(window=2),
    "total": SumMetric,
    "each": CatMetric,
    "states": States,
    "odd": Sums,
}
TEXTS = {"bleu": lambda: BLEUScore(n_gram=2), "edits": EditDistance, "letters": CharErrorRate}


def made() -> dict[str, Metric]:
    several = {name: kind() for name, kind in (SCORED | ALONE | TEXTS).items()}
    several |= {"mrr": RetrievalMRR(), "map": RetrievalMAP(), "late": Late()}
    recall = MulticlassRecall(3, average=None)
    several["by_class"] = ClasswiseWrapper(recall, prefix="recall_")
    outputs = MultioutputWrapper(PearsonCorrCoef(), num_outputs=2)
    several["outputs"] = Named(outputs)
    several["tasks"] = MultitaskWrapper({"a": PearsonCorrCoef(), "b": MeanSquaredError()})
    return several


class Named(Metric):
    """Several values as one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def update(self, *given):
        self.inner.update(*given)

    def compute(self):
        return sum(self.inner.compute())


def fed(metrics, rows: torch.Tensor) -> None:
    """Update all metrics with the samples of these rows."""
    score, target = (rows * 0.7).sin(), rows % 3
    for name in SCORED:
        if name in ("auroc", "listed", "hidden"):
            kept = target if name != "auroc" else target > 0
            metrics[name].update(score, kept.long())
        elif name == "mse":
            metrics[name](score, target.float())  # forward
        elif name == "pearson":
            metrics[name](score, target.float() + score)
        else:
            metrics[name].update(score, target.float())
    for name in ALONE:
        metrics[name].update(score)
    said = [WORDS[row % 5] for row in rows.tolist()]
    right = [WORDS[row % 4] for row in rows.tolist()]
    metrics["bleu"].update(said, [[one] for one in right])
    metrics["edits"].update(said, right)
    metrics["letters"].update(said, right)
    for name in ("mrr", "map"):
        metrics[name].update(score.sigmoid(), target == 0, indexes=rows // 4)
    metrics["late"].update(rows)
    metrics["by_class"].update(torch.stack([score, -score, score * 0], 1), target)
    two = torch.stack([score, score.cos()], 1)
    metrics["outputs"].update(two, two + target[:, None])
    given = {"a": score, "b": score}, {"a": score + target, "b": score * 2}
    metrics["tasks"].update(*given)
    score.zero_()  # recorded inputs are copies


class Fed:
    """The loss of row i is i."""

    def collate(self, samples):
        return {"row": torch.tensor(samples)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["row"])))

    def loss(self, model, batch):
        return model(batch["row"][:, None].float()).sum(), {}

    def metrics(self):
        return MetricCollection(made())

    def update(self, metrics, batch, outputs):
        fed({name: metrics[name] for name in made()}, batch["row"])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale


def plain(size: int) -> dict[str, float]:
    """Return what torchmetrics computes on one process."""
    metrics = made()
    with torch.random.fork_rng():
        for start in range(0, size, MICRO):
            rows = torch.arange(start, min(start + MICRO, size))
            fed(metrics, rows)
        # the draws of the bootstrap
        boot = metrics["boot"] = SCORED["boot"]()
        torch.manual_seed(0)
        for start in range(0, size, MICRO):
            rows = torch.arange(start, min(start + MICRO, size))
            boot.update((rows * 0.7).sin(), (rows % 3).float())
    collection = MetricCollection(metrics)
    computed = collection.compute()
    return {name: float(value) for name, value in computed.items() if value.numel() == 1}


def evaluated() -> list[dict[str, float]]:
    """Return the metrics of each size, without and with sums that do not depend on the ranks."""
    from oneloop.evaluation import evaluate
    from oneloop.launch.processes import start

    world = start()
    model = world.prepare(Scaled())
    results = []
    for size in SIZES:
        for exact in (False, True):
            found = evaluate(
                Fed(),
                model,
                list(range(size)),
                accelerator=world.accelerator,
                micro=MICRO,
                exact=exact,
            )
            del found["loss"]
            results.append(found)
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        pytest.param(1, "single", marks=pytest.mark.slow),
        (2, "ddp"),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
        pytest.param(4, "ddp", marks=pytest.mark.slow),
        pytest.param(4, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_metrics_are_those_of_one_process(ranks, config):
    expected = [plain(size) for size in SIZES for _ in range(2)]
    for results in run(evaluated, ranks=ranks, config=config).ok():
        for found, values in zip(results, expected, strict=True):
            assert found.keys() == values.keys() and len(found) > 20
            for name, value in values.items():
                assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True), name
