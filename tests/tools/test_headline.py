"""The report without a browser: which run is best, curves of classes, matrices, and positions on
other axes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from oneloop.tools.report.charts import axes, charts
from oneloop.tools.report.curve_groups import grouped
from oneloop.tools.report.example_pages import sample_cards
from oneloop.tools.report.examples import matrices
from oneloop.tools.report.headline import ranked
from oneloop.tools.report.matrices import matrices_of, of_classes
from oneloop.tools.report.page import report
from oneloop.tools.run_reader import read_record

pytestmark = pytest.mark.covers(
    "oneloop.tools.report.charts",
    "oneloop.tools.report.curve_groups",
    "oneloop.tools.report.example_pages",
    "oneloop.tools.report.headline",
    "oneloop.tools.report.matrices",
    "oneloop.tools.report.page",
    "oneloop.tools.run_reader",
)


def written(folder: Path, lines: list[dict[str, Any]], **files: Any) -> Path:
    """Write a run folder with these lines in metrics.jsonl."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in files.items():
        ending = "yaml" if name == "recipe" else "json"
        (folder / f"{name}.{ending}").write_text(json.dumps(content))
    return folder


def searched(folder: Path, name: str, values: list[Any], rate: float, **about: Any) -> Path:
    """Write a run of a search whose evaluations have these accuracies."""
    lines = []
    for step, value in enumerate(values, 1):
        lines.append({"step": step, "eval/accuracy": value, "eval/loss": 1.0, "weights": "raw"})
    recipe = {"eval": {"best": "eval/accuracy"}, "optimizer": {"lr": rate}}
    return written(folder / name, lines, recipe=recipe, summary={"exit_reason": "done", **about})


KNOWN = {"best": {"metric": "eval/accuracy", "larger_is_better": True}}


def test_the_best_run_is_first_and_one_without_a_value_last(tmp_path):
    folders = [
        searched(tmp_path, "nothing", ["nan", "nan"], 1.0, **KNOWN),
        searched(tmp_path, "good", [0.5, 0.8], 0.1, **KNOWN),
        searched(tmp_path, "fell", [0.9, 0.2], 0.01, **KNOWN),
    ]
    ranking = ranked([read_record(folder) for folder in folders])
    assert [run.name for run in ranking.runs] == ["fell", "good", "nothing"]
    page = report(folders)
    assert "the best one first: by the largest eval/accuracy" in page
    heads = re.findall('<th scope="col">(.*?)</th>', page)
    assert heads[:3] == ["run", "best eval/accuracy", "optimizer.lr"]
    rows = [re.findall("<td>(.*?)</td>", row)[:3] for row in re.findall("<tr.*?</tr>", page)[1:4]]
    assert rows == [["fell", "0.9", "0.01"], ["good", "0.8", "0.1"], ["nothing", "–", "1"]]
    assert '<tr class="best"><td>fell</td>' in page


def test_runs_keep_their_order_if_no_file_tells_which_is_better(tmp_path):
    names = ["b", "a"]
    folders = [searched(tmp_path, name, [0.5], 0.1) for name in names]
    ranking = ranked([read_record(folder) for folder in folders])
    assert [run.name for run in ranking.runs] == names and not ranking.metric
    assert "best one first" not in report(folders)

    # Of the loss, it is known.
    for name, loss in (("high", 2.0), ("low", 1.0)):
        line = {"step": 1, "eval/loss": loss, "weights": "raw"}
        folders.append(written(tmp_path / name, [line], recipe={"eval": {"best": "eval/loss"}}))
    ranking = ranked([read_record(folder) for folder in folders[2:]])
    assert [run.name for run in ranking.runs] == ["low", "high"]
    assert not ranked([read_record(folder) for folder in folders]).metric  # two metrics


def test_what_one_point_of_several_runs_says_is_in_the_table(tmp_path):
    folders = [searched(tmp_path, name, [0.5], 0.1, **KNOWN) for name in "ab"]
    (folders[0] / "recipe.yaml").write_text(json.dumps({"task": {"name": "own.py:Task"}}))
    runs = [read_record(folder) for folder in folders]
    assert [chart["title"] for chart in charts(runs)] == [LOSS]
    assert [chart["title"] for chart in charts(runs[:1])] == [LOSS, "Accuracy (1 point)"]
    assert "task own.py:Task" in report(folders[:1]) and "task own.py:Task" in report(folders)
    runs = [read_record(searched(tmp_path, name, [0.5, 0.6], 0.1)) for name in "cd"]
    titles = [chart["title"] for chart in charts(runs)]
    assert titles == [LOSS.replace("1 point", "2 points"), "Accuracy (2 points)"]


LOSS = "Loss (train: mean since the previous point) (1 point)"


def test_the_title_says_what_the_samples_show(tmp_path):
    parts = {"parts": {"image": "data:image/png;base64,AA=="}}
    for number, (sample, title) in enumerate(
        (
            (parts, "Pictures for validation samples, at step 3"),
            ({"text": "x"}, "Some validation samples, at step 3"),
            ({**parts, "prediction": "cat"}, "Predictions for validation samples, at step 3"),
        )
    ):
        examples = {"step": 3, "samples": [{"index": 0, **sample}]}
        folder = written(tmp_path / str(number), [{"step": 3}], examples=examples)
        assert f"<h2>{title}</h2>" in report([folder])


def test_what_is_judged():
    for sample, kind in (
        ({"prediction": "cat", "target": "dog"}, "wrong"),
        ({"prediction": "2.5", "target": "2.25"}, "soft"),
        ({"prediction": "cat"}, "soft"),
        ({"prediction": "97.9% of pixels"}, "soft"),
        ({"prediction": "3", "target": "3"}, "right"),
        ({"prediction": "3", "target": "4", "right": True}, "right"),
    ):
        (card,) = sample_cards({"samples": [sample]})["fixed"]
        assert card["kind"] == kind


def test_curves_of_classes_are_in_one_chart(tmp_path):
    lines = []
    for step in (1, 2):
        values = {"f1_cat": 0.5, "f1_big_dog": 0.25 * step, "macro_f1": 0.3, "accuracy": 0.4}
        lines.append({"step": step, "weights": "raw"} | {f"eval/{n}": v for n, v in values.items()})
    environment = {"recorded": {"classes": ["cat", "big_dog"]}}
    one = read_record(written(tmp_path / "one", lines, environment=environment))
    drawn = {chart["title"]: chart["data"] for chart in charts([one])}
    assert list(drawn) == [
        "F1 of each class (2 points)",
        "Macro f1 (2 points)",
        "Accuracy (2 points)",
    ]
    curves = {trace["name"]: trace["y"] for trace in drawn["F1 of each class (2 points)"]}
    assert curves == {"cat": [0.5, 0.5], "big_dog": [0.25, 0.5]}
    colours = {trace["line"]["color"] for trace in drawn["F1 of each class (2 points)"]}
    assert len(colours) == 2

    # Of several runs, each has a chart of its classes.
    other = read_record(written(tmp_path / "other", lines, environment=environment))
    titles = [chart["title"] for chart in charts([one, other])]
    assert titles[:2] == [
        "F1 of each class: one (2 points)",
        "F1 of each class: other (2 points)",
    ]


def test_parts_of_a_mixture_are_a_group_and_unknown_classes_are_not():
    names = [f"eval/f1_{name}" for name in ("traffic_light", "traffic_sign", "car")]
    assert grouped(names) == {name: {name: ""} for name in names}
    assert list(grouped(names, classes=["traffic_light", "traffic_sign"])) == [
        "eval/f1",
        "eval/f1_car",
    ]
    parts = ["eval/loss/books", "eval/loss/code"]
    assert grouped(parts) == {"eval/loss": dict(zip(parts, ("books", "code"), strict=True))}


class Named:
    """A task that names the rows and columns of a matrix."""

    classes = ("a", "b", "c")
    matrices: ClassVar[dict[str, Any]] = {"found": (["a", "b", "c"], ["a", "b", "c", "nothing"])}


def test_matrices_have_any_shape(tmp_path):
    from torchmetrics.functional.classification import (
        multilabel_confusion_matrix,
        multilabel_f1_score,
        multilabel_precision,
        multilabel_recall,
    )

    torch.manual_seed(0)
    probabilities, target = torch.rand(50, 3), torch.randint(2, (50, 3))
    computed = {
        "confusion": torch.arange(9).reshape(3, 3),
        "found": torch.arange(12).reshape(3, 4),
        "labels": multilabel_confusion_matrix(probabilities, target, 3),
        "pairs": torch.tensor([[0.5, 1.5], [0.0, 1.0], [2.0, 0.0], [0.0, 0.0]]),
        "number": torch.tensor(3.0),
        "cube": torch.zeros(3, 3, 3),
    }
    found = matrices(Named(), computed)
    assert list(found) == ["confusion", "found", "labels", "pairs"]
    assert found["found"]["columns"] == ["a", "b", "c", "nothing"]
    assert found["pairs"]["rows"] == ["0", "1", "2", "3"] and found["labels"]["rows"][2] == "c"

    lines = [{"step": 1, "train/loss": 1.0}]
    run = read_record(written(tmp_path / "run", lines, examples={"step": 1, "matrices": found}))
    read = matrices_of(run.examples)
    assert read == json.loads(json.dumps(found))
    titles = [chart["title"] for chart in charts([run])]
    assert "Labels of the validation set: samples of each label" in titles
    assert "Found of the validation set: rows are the true classes" in titles

    # The table of the labels agrees with torchmetrics.
    assert of_classes(read["found"]) == []
    for (name, samples, *shown), label, *theirs in zip(
        of_classes(read["labels"]),
        range(3),
        multilabel_precision(probabilities, target, 3, average=None),
        multilabel_recall(probabilities, target, 3, average=None),
        multilabel_f1_score(probabilities, target, 3, average=None),
        strict=True,
    ):
        assert name == "abc"[label] and samples == int(target[:, label].sum())
        assert [float(one) for one in shown] == pytest.approx(list(map(float, theirs)), abs=1e-4)

    # Without as many names, rows and columns are numbered.
    Named.matrices = {"found": (["a", "b"], ["a"])}
    numbered = matrices(Named(), computed)["found"]
    assert numbered["rows"] == ["0", "1", "2"] and numbered["columns"] == ["0", "1", "2", "3"]


def test_damaged_matrices():
    expected = {"rows": ["a", "b"], "columns": ["a", "b"], "counts": [[1, 2], [3, 4]]}
    assert matrices_of({"matrices": {"m": expected}}) == {"m": expected}
    for counts in ([[1, 2]], [[1], [2]], [[1, "nan"], [1, 2]], 3, None, [["a", 1], [1, 2]]):
        assert matrices_of({"matrices": {"m": {**expected, "counts": counts}}}) == {}
    assert matrices_of({"matrices": [1]}) == matrices_of({}) == {}


def test_positions_on_the_other_axes(tmp_path):
    lines: list[dict[str, Any]] = []
    for step in (10, 20, 30):
        lines.append(
            {"step": step, "samples": 64 * step, "time": 60.0 * step, "train/loss": 1 / step}
        )
    lines.append({"step": 15, "samples": 999, "eval/loss": 0.5, "weights": "raw"})
    run = read_record(written(tmp_path / "run", lines))
    assert axes([run]) == {
        "step": "step",
        "samples": "samples trained on",
        "time": "time in minutes",
    }
    train, evaluation = charts([run])[0]["data"]
    assert train["meta"] == {
        "step": [10, 20, 30],
        "samples": [640, 1280, 1920],
        "time": [10, 20, 30],
    }
    assert evaluation["meta"] == {"step": [15], "samples": [960], "time": [15]}

    # Without times, there is one axis.
    bare = read_record(written(tmp_path / "bare", [{"step": 1, "train/loss": 1.0}]))
    assert list(axes([bare])) == ["step"] and "Charts by" not in report([tmp_path / "bare"])
