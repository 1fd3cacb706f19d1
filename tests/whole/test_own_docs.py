"""The recipes and programs of docs/reference/data.md, docs/reference/models.md and
docs/how-to/data-in-a-bucket.md run unchanged."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from oneloop.cli import main
from own_files import images, rows, write
from pages import blocks, program
from remote_data import counted_s3
from slow_cases import with_slow
from small_models import bert, vit
from worlds import ROOT, apply, here, run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.mixture",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_regression",
    "oneloop.tasks.token_classification",
    "oneloop.tools.after_training.evaluate_and_predict",
)

RECIPES = blocks("reference/data.md", "yaml")
MODELS = blocks("reference/models.md", "yaml")
PROGRAMS = blocks("reference/models.md", "python")
SPLITS = {
    "reviews.yaml": ("single", 1),
    "scores.yaml": ("single", 1),
    "names.yaml": ("single", 1),
    "photos.yaml": ("single", 1),
    "mixture.yaml": ("fsdp2", 2),
}
FEW = ["--duration", "2", "--save.every", "0", "--save.best", "false"]
SMALL = ["--task.layers", "1", "--task.heads", "2", "--task.width", "16"]


@pytest.fixture
def folder(tmp_path):
    """Create the files that the recipes name."""
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(text)
    made = rows(120)
    reviews = [
        {"body": row["text"], "title": row["label"], "stars": n % 5} for n, row in enumerate(made)
    ]
    write(tmp_path / "reviews", "parquet", reviews)
    with (tmp_path / "scores.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["body", "score"])
        lines.writerows([f"{row['text']}, as it is", row["number"]] for row in made)
    write(
        tmp_path / "names",
        "jsonl",
        [{"words": row["tokens"], "kinds": row["tags"]} for row in made],
    )
    for part in ("train", "validation"):
        images(tmp_path / "photos" / part, "folders", each=12)
    write(tmp_path / "books", "parquet", made)
    write(tmp_path / "talk", "text", made[:30])
    (tmp_path / "code.jsonl").write_text(
        "".join(json.dumps({"source": row["text"] * 9}) + "\n" for row in made)
    )
    return tmp_path


def test_every_recipe_of_the_page_is_run():
    assert RECIPES.keys() == SPLITS.keys() and MODELS.keys() == OF_MODELS.keys()
    assert PROGRAMS.keys() == {"distil.py", "digits_as_files.py"}


@pytest.mark.parametrize("recipe", with_slow(SPLITS, ["mixture.yaml"]))
def test_a_recipe_of_the_page_trains(folder, recipe):
    config, ranks = SPLITS[recipe]
    words = [
        recipe,
        "--run.dir",
        "run",
        *(SMALL if recipe != "photos.yaml" else FEW),
        "--track",
        "none",
    ]
    run(train, words, ranks=ranks, config=config, folder=folder).ok()
    ended = json.loads((folder / "run" / "summary.json").read_text())
    assert ended["exit_code"] == 0
    figure = {"scores.yaml": "spearman", "mixture.yaml": "loss/chat"}.get(recipe, "macro_f1")
    assert any(name == f"eval/{figure}" for name in ended), ended


OF_MODELS = {
    "fine-tune.yaml": ("fsdp2", 2, "eval/accuracy"),
    "reviews.yaml": ("ddp", 2, "eval/macro_f1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", OF_MODELS)
def test_a_recipe_of_models_trains_and_predicts(tmp_path, recipe):
    config, ranks, figure = OF_MODELS[recipe]
    (tmp_path / recipe).write_text(MODELS[recipe])
    images(tmp_path / "photos", "folders", each=30)
    vit(tmp_path / "vit", 5)
    bert(tmp_path / "bert", positions=64)
    lines = [json.dumps({"body": row["text"], "stars": row["label"]}) + "\n" for row in rows(120)]
    (tmp_path / "reviews.jsonl").write_text("".join(lines))
    run(
        train,
        [recipe, "--run.dir", "run", "--track", "none"],
        ranks=ranks,
        config=config,
        folder=tmp_path,
    ).ok()
    assert figure in json.loads((tmp_path / "run" / "summary.json").read_text())
    assert next((tmp_path / "run" / "base").glob("*/frozen.safetensors")).is_file()
    new = "photos" if recipe == "fine-tune.yaml" else "reviews.jsonl"
    words = ["predict", "run", "--data", new, "--to", "said.jsonl"]
    run(apply, words, ranks=ranks, config=config, folder=tmp_path).ok()
    assert len((tmp_path / "said.jsonl").read_text().splitlines()) == (
        90 if new == "photos" else 120
    )


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("single", 1),
        pytest.param("ddp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_the_student_learns_from_its_teacher(tmp_path, config, ranks):
    (tmp_path / "distil.py").write_text(PROGRAMS["distil.py"])
    common = ["--track", "none", "--eval.every", "0", "--batch.size", "32"]
    run(
        train,
        ["digits", "--duration", "1ep", "--run.dir", "runs/teacher", *common],
        folder=tmp_path,
    ).ok()
    teacher = tmp_path / "runs" / "teacher" / "final" / "model.safetensors"
    words = [
        "digits",
        "--task",
        "distil.Distilled",
        "--task.teacher",
        str(teacher),
        "--duration",
        "1ep",
        *common,
    ]
    run(here, [*words, "--run.dir", "run"], ranks=ranks, config=config, folder=tmp_path).ok()
    last = load_file(tmp_path / "run" / "final" / "model.safetensors")
    tensors = load_file(teacher)
    assert all(torch.equal(last[f"teacher.{name}"], tensor) for name, tensor in tensors.items())
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["eval/accuracy"] > 0.7
    student = load_file(tmp_path / "run" / "final" / "student.safetensors")
    assert all(torch.equal(last[f"student.{name}"], tensor) for name, tensor in student.items())
    size = next((tmp_path / "run" / "base").glob("*/frozen.safetensors")).stat().st_size
    assert size > sum(tensor.numel() * 4 for tensor in tensors.values())


def test_digits_become_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(PROGRAMS["digits_as_files.py"], {})
    assert len(list((tmp_path / "images").rglob("*.png"))) == 1797


@pytest.mark.slow
def test_data_in_a_bucket(tmp_path):
    """The page's program, commands and recipe, with a local S3; resumed from a disk.

    The requests of training are those of the start line, which the page's formula gives.
    """
    page = "how-to/data-in-a-bucket.md"
    write_program = blocks(page, "python")["write.py"]
    # Use smaller groups, so that few rows fill several of them.
    (tmp_path / "write.py").write_text(write_program.replace("1000", "100"))
    (tmp_path / "reviews.yaml").write_text(blocks(page, "yaml")["reviews.yaml"])
    lines = [json.dumps({"body": row["text"], "stars": row["label"]}) + "\n" for row in rows(2400)]
    (tmp_path / "reviews.jsonl").write_text("".join(lines))
    run(program, "write.py", folder=tmp_path).ok()

    with counted_s3() as s3:
        s3.copy(tmp_path / "reviews", "s3://my-bucket/reviews")
        there = {**s3.variables, "ONELOOP_CACHE": str(tmp_path / "cache")}
        checked = run(main, ["check", "reviews.yaml"], folder=tmp_path, variables=there)
        assert checked.ok() == [0], checked.output

        before = len(s3.proxy.ranges("train.parquet"))
        words = ["reviews.yaml", *SMALL, "--duration", "1ep", "--track", "none", "--run.dir", "run"]
        world = run(train, words, folder=tmp_path, variables=there)
        world.ok()
        requests = s3.proxy.ranges("train.parquet")[before:]
        assert "in 22 requests per epoch" in world.output
        assert len(requests) == 22 == len({(one.start, one.end) for one in requests})

        # The split by groups needs the training file only.
        file = ["--task.data", "s3://my-bucket/reviews/train.parquet", "--run.dir", "groups"]
        rejected = run(train, [*words, *file], folder=tmp_path, variables=there)
        assert rejected.codes == [2] and "--task.split_by groups" in rejected.output
        by_groups = [*words, *file, "--task.split_by", "groups"]
        run(train, by_groups, folder=tmp_path, variables=there).ok()

    # The folder on the disk resumes the run, without a server.
    resumed = run(train, [*words, "--task.data", "reviews", "--duration", "2ep"], folder=tmp_path)
    resumed.ok()
    assert "resuming from" in resumed.output


@pytest.mark.slow
def test_the_benchmark_of_the_page_runs():
    words = [sys.executable, str(ROOT / "benchmarks" / "data_anywhere.py"), "--quick"]
    done = subprocess.run([*words, "--latency", "0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(f"| {name} |" in done.stdout for name in ("disk", "control", "oneloop, 0 ms"))
