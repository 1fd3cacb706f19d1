"""The programs of the gallery: each reaches the value that it states, which needs training, and is
the same on one process and on two."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from pages import blocks, program
from slow_cases import with_slow
from worlds import ROOT, run, train

pytestmark = pytest.mark.covers(
    "oneloop.api", "oneloop.tools.compare.compare_runs", "oneloop.train"
)

GALLERY = ROOT / "docs" / "gallery"
PAGES = sorted(page.stem for page in GALLERY.glob("*.md") if page.stem != "index")

# The values that a program states: its metric must be above the first or below the second one.
STATED = {
    "audio": {"eval/accuracy": (0.95, None)},
    "detection": {"eval/precision": (0.8, None), "eval/recall": (0.8, None)},
    "diffusion": {"ema/eval/coverage": (0.55, None)},
    "forecasting": {"eval/error": (None, 0.7)},
    "graphs": {"eval/accuracy": (0.95, None)},
    "multilabel": {"eval/macro_f1": (0.75, None)},
    "recommender": {"eval/hits": (0.3, None)},
    "search": {"eval/accuracy": (0.95, None), "test/accuracy": (0.85, None)},
}
SLOW = ["audio", "detection", "diffusion", "multilabel", "search"]


def lay_out(name: str, folder: Path) -> tuple[str, list[str]]:
    """Write a program into a folder; return its text, and the commands that its page prints."""
    ((file, text),) = blocks(f"gallery/{name}.md", "python").items()
    assert file == f"{name}.py"
    (folder / file).write_text(text)
    lines = (GALLERY / f"{name}.md").read_text().splitlines()
    return text, [line for line in lines if line.startswith(("oneloop ", "python "))]


def task_of(name: str, folder: Path):
    """Return the task of a program, and its other names."""
    lay_out(name, folder)
    names = runpy.run_path(str(folder / f"{name}.py"))
    (kind,) = (one for one in names.values() if hasattr(one, "train_set"))
    return kind(), names


def whole(task, *, data: str = "validation") -> dict:
    """Return a data set as one batch, with the same random numbers each time."""
    samples = task.eval_sets()[data]
    torch.manual_seed(0)
    return task.collate([samples[index] for index in range(len(samples))])


def most_frequent(labels: torch.Tensor) -> float:
    return float(labels.long().bincount().max()) / len(labels)


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def check_stated(name: str, found: dict) -> None:
    for metric, (above, below) in STATED[name].items():
        print(f"{name}: {metric} {found[metric]:.4f}")
        if above is not None:
            assert found[metric] > above, metric
        if below is not None:
            assert found[metric] < below, metric


def test_each_page_has_one_program_of_at_most_90_lines(tmp_path):
    listed = (GALLERY / "index.md").read_text()
    assert sorted(STATED) == PAGES
    for name in PAGES:
        text, commands = lay_out(name, tmp_path)
        assert len(text.splitlines()) <= 90, name
        assert max(map(len, text.splitlines())) <= 100, name
        assert f"({name}.md)" in listed and commands
        stated = " ".join(ast.get_docstring(ast.parse(text)).split())
        for metric, limits in STATED[name].items():
            (limit,) = (one for one in limits if one is not None)
            assert metric in stated and str(limit) in stated, name


@pytest.mark.parametrize("name", with_slow(sorted({*PAGES} - {"search"}), SLOW))
def test_a_program_reaches_its_value(tmp_path, name):
    _, (command, *_) = lay_out(name, tmp_path)
    words = command.split()
    assert words[:4] == ["oneloop", "launch", "--config_file", "single"]
    run(train, [*words[4:], "--track", "none"], folder=tmp_path).ok()
    found = summary(tmp_path / "runs" / name)
    check_stated(name, found)
    if name == "forecasting":
        assert found["eval/last_value"] > 1.5 and found["eval/last_day"] > 1.5
    if name == "recommender":
        assert found["eval/popular_hits"] < 0.15


def test_the_search_finds_the_best_rate_and_compares_all_runs(tmp_path):
    _, commands = lay_out("search", tmp_path)
    assert commands == ["python search.py", "oneloop compare runs/search/lr-*"]
    world = run(program, "search.py", "summaries", "best", folder=tmp_path)
    ((summaries, best),) = world.ok()
    check_stated("search", summaries[best])
    assert summaries[min(summaries)]["eval/accuracy"] < 0.7
    assert best == max(summaries, key=lambda rate: summaries[rate]["eval/accuracy"])

    # Each run has its own folder, and its summary is that of its own training.
    folders = sorted(tmp_path.glob("runs/search/lr-*"))
    assert len(folders) == 4
    for rate, returned in summaries.items():
        written = summary(tmp_path / f"runs/search/lr-{rate:g}")
        assert {**written, **returned} == {**returned, "checksum": written["checksum"]}

    # `oneloop compare` takes all of them.
    words = [sys.executable, "-m", "oneloop", "compare", *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    for folder in folders:
        assert folder.name in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("optimizer.lr"))
    assert [float(cell) for cell in line.split("│")[1:]] == sorted(summaries)
    # That the first run has no hashes is said once.
    assert " ".join(done.stdout.split()).count("not compared bit by bit") == 1

    # The same program again returns the finished runs.
    ((again,),) = run(program, "search.py", "summaries", folder=tmp_path).ok()
    assert again == summaries


@pytest.mark.parametrize("name", ["audio", "graphs", "search"])
def test_the_most_frequent_class_does_not_reach_the_value(tmp_path, name):
    task, _ = task_of(name, tmp_path)
    batch = whole(task)
    labels = batch[{"audio": "kind", "graphs": "answer", "search": "y"}[name]]
    reached = most_frequent(labels)
    print(f"{name}: the most frequent class reaches {reached:.4f}")
    assert reached < {"audio": 0.26, "graphs": 0.7, "search": 0.12}[name]


def test_boxes_without_training(tmp_path):
    """New weights find nothing. Perfect boxes around discs and squares are right in half of the
    cases, and perfect boxes around discs always."""
    task, _ = task_of("detection", tmp_path)
    batch = whole(task)
    torch.manual_seed(0)
    with torch.no_grad():
        _, outputs = task.loss(task.model(), batch)
    metrics = task.metrics()
    task.update(metrics, batch, outputs)
    assert metrics.compute()["recall"] < 0.1

    cells = batch["cells"]
    discs = cells[..., 0]
    assert abs(float(discs.sum()) / (4 * len(discs)) - 0.5) < 0.02  # one object in each quarter
    metrics = task.metrics()
    scores = 2 * discs - 1
    task.update(metrics, batch, {"found": torch.cat([scores[..., None], cells[..., 1:]], dim=2)})
    assert metrics.compute() == {"precision": 1, "recall": 1}


def test_images_without_training(tmp_path):
    """A normal distribution with the mean and covariance of the digits does not reach the coverage
    of the program, nor do new weights. Images of the training set do."""
    task, names = task_of("diffusion", tmp_path)
    batch = whole(task)
    known = torch.stack(
        [task.train_set()[index]["image"] for index in range(len(task.train_set()))]
    )

    def coverage(images: torch.Tensor) -> float:
        metrics = task.generated_metrics()
        task.update_generated(metrics, batch, {"image": images.float()})
        return float(metrics.compute()["coverage"])

    mean, covariance = known.mean(dim=0).numpy(), torch.cov(known.T).numpy()
    generator = np.random.default_rng(0)
    drawn = generator.multivariate_normal(mean, covariance, len(batch["image"]))
    normal = torch.from_numpy(drawn)
    assert coverage(normal) < 0.35
    assert coverage(normal.clamp(-1, 1)) < 0.5
    torch.manual_seed(0)
    with torch.no_grad():
        new = task.generate(task.model(), batch)["image"]
    assert coverage(new) < 0.05
    assert coverage(known[: len(normal)]) > 0.85

    # The coverage of Naeem et al. in numpy, for the first images of the training set.
    real, fake = batch["image"].double().numpy(), known[:200].double().numpy()
    between = np.linalg.norm(real[:, None] - real[None], axis=2)
    radius = np.sort(between, axis=1)[:, 5]
    nearest = np.linalg.norm(real[:, None] - fake[None], axis=2).min(axis=1)
    metrics = names["Coverage"]()
    padded = torch.cat([known[:200], known[:1].expand(len(real) - 200, -1)])
    metrics.update(padded, batch["image"])
    assert float(metrics.compute()) == pytest.approx((nearest < radius).mean(), abs=1e-6)


def test_labels_without_training(tmp_path):
    task, _ = task_of("multilabel", tmp_path)
    labels = whole(task)["labels"].numpy().astype(int)
    every = f1_score(labels, np.ones_like(labels), average="macro")
    none = f1_score(labels, np.zeros_like(labels), average="macro", zero_division=0)
    assert every == pytest.approx(0.43, abs=0.005) and none == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_one_process_and_two_train_the_same(tmp_path, name):
    _, (command, *_) = lay_out(name, tmp_path)
    words = command.split()[4:] if command.startswith("oneloop") else ["search.py"]
    words += ["--duration", "8", "--schedule.name", "constant", "--schedule.warmup", "0"]
    words += ["--eval.every", "0", "--log.every", "1", "--track", "none"]
    words += ["--machine.dtype", "float64"]
    losses = {}
    ends = {}
    for ranks in (1, 2):
        folder = f"on-{ranks}"
        run(train, [*words, "--run.dir", folder], ranks=ranks, folder=tmp_path).ok()
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line) for line in lines]
        losses[ranks] = [line["train/loss"] for line in logged if "train/loss" in line]
        ends[ranks] = summary(tmp_path / folder)
    assert len(losses[1]) == 8
    assert losses[2] == pytest.approx(losses[1], rel=1e-9)
    metrics = [metric for metric in ends[1] if metric.startswith(("eval/", "ema/eval/"))]
    assert len(metrics) > 1
    for metric in metrics:
        one, two = (float(ends[ranks][metric]) for ranks in (1, 2))  # "NaN" is a text in JSON
        assert two == pytest.approx(one, rel=1e-6, nan_ok=True), metric
