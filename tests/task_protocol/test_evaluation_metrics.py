"""What users' metrics may compute, how they are named, and which direction is better."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import default_collate
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MultilabelConfusionMatrix,
)

from oneloop import fit
from oneloop.basics.exit_codes import BadInput
from oneloop.loop.counters import Best
from oneloop.task_protocol.evaluation_metrics import (
    directions,
    make_metrics,
    named_values,
    not_logged,
    scalars,
)
from oneloop.tools.report.examples import matrices

pytestmark = pytest.mark.covers(
    "oneloop.loop.counters",
    "oneloop.task_protocol.evaluation_metrics",
)

NEITHER = "neither logged nor drawn; wrap it in torchmetrics' ClasswiseWrapper, or average it"
QUIET: dict[str, Any] = {"watch": {"output": "quiet"}, "track": [], "machine": {"workers": 0}}


class Count(torchmetrics.Metric):
    """The number of samples, as ``make`` returns it."""

    full_state_update = False
    higher_is_better: bool | None = None

    def __init__(self, make: Any = lambda number: number) -> None:
        super().__init__()
        self.make = make
        self.add_state("n", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.n += len(x)

    def compute(self) -> Any:
        return self.make(self.n)


class Measured:
    """A linear model, with these metrics."""

    named: ClassVar[dict[str, Any]] = {}
    collate = staticmethod(default_collate)

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def _data(self, count: int, seed: int) -> list[dict[str, Tensor]]:
        drawn = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        return [{"x": x, "y": x.sum(0, keepdim=True)} for x in drawn]

    def train_set(self) -> Any:
        return self._data(100, 0)

    def eval_sets(self) -> dict[str, Any]:
        return {"validation": self._data(20, 1)}

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
        return (model(batch["x"]) - batch["y"]).square().sum(), {}

    def metrics(self) -> Any:
        return {name: make() for name, make in self.named.items()}

    def update(self, metrics: Any, batch: dict[str, Tensor], outputs: Any) -> None:
        metrics.update(batch["x"])


def run(folder: Path, named: dict[str, Any], **keys: Any) -> dict[str, Any]:
    Measured.named = named
    keys = {"duration": 4, "batch": {"size": 16}, **keys}
    return fit(Measured, run={"dir": str(folder / "run")}, **QUIET, **keys)


KINDS = {
    "tensor": lambda number: number,
    "float": float,
    "int": int,
    "numpy": lambda number: np.float32(number),
    "array of one": lambda number: np.array([float(number)]),
    "dict of floats": lambda number: {"m": float(number)},
    "dict of numpy values": lambda number: {"m": np.int64(number)},
}


def test_numbers_of_any_kind_are_logged(tmp_path):
    for name, make in KINDS.items():
        metrics = torchmetrics.MetricCollection({"m": Count(make)})
        metrics.update(torch.zeros(20, 4))
        assert scalars(named_values(metrics, metrics.compute())) == {"m": 20.0}, name
    found = run(tmp_path, {"m": lambda: Count(float), "yes": lambda: Count(lambda n: bool(n > 5))})
    assert found["eval/m"] == 20.0 and found["eval/yes"] == 1.0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["eval/m"] for line in lines if "eval/m" in line] == [20.0]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda number: "many", "the metric 'm' computes a str, which is not a number"),
        (lambda number: None, "the metric 'm' computes a NoneType"),
        (lambda number: torch.zeros(3), "the metric 'm' returns 3 values without names"),
    ],
)
def test_what_is_no_number_is_rejected_before_the_run(tmp_path, make, expected):
    with pytest.raises(BadInput, match=expected):
        run(tmp_path, {"m": lambda: Count(make)})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["loss", "loss/x"])
def test_no_metric_replaces_the_loss(tmp_path, name):
    with pytest.raises(BadInput, match=f"the metric '{name}' has the name of the loss"):
        run(tmp_path, {name: Count})
    with pytest.raises(BadInput, match="the metric 'loss' has the name of the loss"):
        run(tmp_path, {"m": lambda: Count(lambda number: {"loss": number})})
    # As the name of a metric, only the loss of an evaluation is taken.
    assert run(tmp_path, {"sums": Count, "my loss": Count})["eval/sums"] == 20.0


def test_values_that_are_not_logged_are_reported():
    metrics = torchmetrics.MetricCollection(
        {
            "labels": MultilabelConfusionMatrix(num_labels=3),
            "first": MulticlassConfusionMatrix(3),
            "second": MulticlassConfusionMatrix(4),
            "each": torchmetrics.CatMetric(),
        },
        compute_groups=False,
    )
    metrics["labels"].update(torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.int64))
    for name in ("first", "second"):
        metrics[name].update(torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))
    metrics["each"].update(torch.zeros(5))
    values = named_values(metrics, metrics.compute())
    assert not_logged({**values, "cube": torch.zeros(3, 3, 3), "large": torch.zeros(300, 300)}) == [
        f"the metric 'each' has 5 values: {NEITHER}",
        f"the metric 'cube' has 3 x 3 x 3 values: {NEITHER}",
        f"the metric 'large' has 300 x 300 values: {NEITHER}",
    ]
    assert list(matrices(object(), values)) == ["first", "labels", "second"]


def test_a_value_that_is_not_logged_is_printed_at_the_start(tmp_path, capfd):
    class Each(torchmetrics.CatMetric):
        def update(self, x: Tensor) -> None:
            super().update(x[:, 0])

    Measured.named = {"each": Each, "m": Count}
    keys = {"duration": 2, "batch": {"size": 16}, "track": [], "machine": {"workers": 0}}
    found = fit(Measured, run={"dir": str(tmp_path / "run")}, **keys)
    said = capfd.readouterr().out
    assert "the metric 'each' has" in said and NEITHER in said
    assert "eval/each" not in found and found["eval/m"] == 20.0


class Single(torchmetrics.Metric):
    """One metric of two values, each with its direction."""

    full_state_update = False
    higher_is_better: ClassVar[dict[str, bool]] = {"mean": True, "spread": False}

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = values
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.total += x.sum()

    def compute(self) -> dict[str, Any]:
        return dict(zip(self.higher_is_better, self.values, strict=False))


class Free(Measured):
    """Its metrics are what ``make`` returns."""

    make: ClassVar[Any]

    def metrics(self) -> Any:
        return type(self).make()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Single(0.1, np.float32(2.0)), {"mean": 0.1, "spread": 2.0}),
        (lambda: {"a": Count(), "b": Count(float)}, {"a": 20.0, "b": 20.0}),
        (Count, {"Count": 20.0}),
    ],
)
def test_a_metric_alone_and_a_dict_of_metrics_have_names_and_directions(make, expected):
    Free.make = make
    task = Free()
    metrics = make_metrics(task, "metrics")
    task.update(metrics, {"x": torch.zeros(20, 4)}, {})
    assert scalars(named_values(metrics, metrics.compute())) == expected
    names = directions(task)
    assert names.keys() == {"loss", *expected}
    assert names.get("mean", True) is True and not names.get("spread")


class Sums:
    """Metrics as oneloop had them before: an object with ``sums``."""

    def sums(self) -> list[Tensor]:
        return []


def test_an_object_with_sums_gets_one_message_that_says_what_to_write(tmp_path):
    Free.make = Sums
    message = (
        r"metrics\(\) returned a Sums, expected a torchmetrics.Metric, .*let a class with sums\(\) "
        r"derive from torchmetrics.Metric.*add_state\(NAME, zeros, dist_reduce_fx="
    )
    with pytest.raises(BadInput, match=message):
        fit(Free, run={"dir": str(tmp_path / "run")}, duration=4, batch={"size": 16}, **QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "the metric 'mean' computes a NoneType, which is not a number"),
        ("abc", "the metric 'mean' computes a str"),
        ([1.0, "a"], "the metric 'mean' computes a list"),
    ],
)
def test_a_value_that_is_no_number_is_named(value, expected):
    metrics = Single(value)
    with pytest.raises(ValueError, match=expected):
        named_values(metrics, metrics.compute())


def test_several_values_of_one_metric_are_reported():
    metrics = make_metrics(SimpleNamespace(metrics=lambda: Single(np.array([1.0, 2.0]))), "metrics")
    values = named_values(metrics, metrics.compute())
    assert scalars(values) == {}
    assert not_logged(values) == [f"the metric 'mean' has 2 values: {NEITHER}"]


# --- which direction is better ---


def test_the_direction_comes_from_the_metric_or_from_inside_a_wrapper():
    class Wrapped:
        def metrics(self) -> Any:
            accuracy = MulticlassAccuracy(3)
            return torchmetrics.MetricCollection(
                {
                    "mean": torchmetrics.MeanMetric(),
                    "error": 1 - MulticlassAccuracy(3),
                    "each": torchmetrics.wrappers.ClasswiseWrapper(
                        MulticlassAccuracy(3, average=None)
                    ),
                    "accuracy": accuracy,
                    "squares": torchmetrics.MeanSquaredError(),
                }
            )

    found = directions(Wrapped())
    assert found["mean"] is None and found["error"] is None
    assert found["accuracy"] is True and found["squares"] is False and found["loss"] is False
    assert [value for name, value in found.items() if name.startswith("multi")] == [True] * 3


def test_a_metric_without_direction_needs_one(tmp_path):
    named = {"recall@10": torchmetrics.MeanMetric}
    with pytest.raises(BadInput, match="max:eval/recall@10.*min:eval/recall@10"):
        run(tmp_path, named, eval={"best": "eval/recall@10"})
    assert not (tmp_path / "run").exists()
    assert run(tmp_path, named)["best"]["metric"] == "eval/loss"  # the default never needs it


class Falling(Measured):
    """Its metric is -step: the largest value is the first."""

    progress: Any = None

    def metrics(self) -> Any:
        step = self.progress.step
        return torchmetrics.MetricCollection({"m": Count(lambda number: -float(step))})


@pytest.mark.parametrize(("best", "step"), [("max:eval/m", 2), ("min:eval/m", 6)])
def test_max_and_min_keep_the_best_step(tmp_path, best, step):
    keys: dict[str, Any] = {"duration": 6, "batch": {"size": 16}}
    keys["eval"] = {"every": 2, "best": best}
    found = fit(Falling, run={"dir": str(tmp_path / "run")}, **QUIET, **keys)
    better = {"larger_is_better": best.startswith("max")}
    assert found["best"] == {"metric": "eval/m", "value": -float(step), "step": step, **better}

    # A longer run goes on with its best.
    keys["duration"] = 8
    again = fit(
        Falling, run={"dir": str(tmp_path / "run"), "accept_changes": True}, **QUIET, **keys
    )
    assert again["step"] == 8
    assert again["best"]["step"] == (2 if best.startswith("max") else 8)


def test_the_best_of_another_metric_is_not_compared():
    old = Best("eval/loss", value=1.0, step=5, since=3)
    same, other = Best("eval/loss"), Best("eval/accuracy")
    turned = Best("eval/loss", upward=True)
    turned.load_state_dict(old.state_dict())
    assert turned.value is None
    same.load_state_dict(old.state_dict())
    other.load_state_dict(old.state_dict())
    assert (same.value, same.step, same.since, other.value) == (1.0, 5, 3, None)
