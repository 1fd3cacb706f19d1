"""The programs and commands of the tutorials, in their order; long runs are shortened."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch

import pages
from pages import blocks
from worlds import ROOT, apply, run, train

pytestmark = pytest.mark.covers(
    "oneloop.loop.start_lines",
    "oneloop.tasks.template",
    "oneloop.train",
)

QUIET = ["--track", "none"]


def lay_out(page: str, folder: Path) -> str:
    """Write the programs and recipes of a tutorial into a folder; return its text."""
    for kind in ("python", "yaml"):
        for name, text in blocks(f"tutorials/{page}", kind).items():
            (folder / name).write_text(text)
    return (ROOT / "docs" / "tutorials" / page).read_text()


def program(folder: Path, name: str) -> None:
    run(pages.program, name, folder=folder).ok()


def command(text: str, start: str) -> list[str]:
    """The words after ``oneloop launch --config_file single`` of a command in a tutorial."""
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith(f"oneloop launch --config_file single {start}")
    )
    return line.split()[4:]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_a_csv_file_and_a_folder_of_images(tmp_path):
    text = lay_out("own-data.md", tmp_path)
    program(tmp_path, "make_messages.py")
    run(train, [*command(text, "messages.yaml"), "--duration", "1ep", *QUIET], folder=tmp_path).ok()
    assert summary(tmp_path / "runs" / "messages")["test/accuracy"] > 0.95
    run(
        apply,
        ["predict", "runs/messages", "--data", "new.csv", "--to", "predictions.csv"],
        folder=tmp_path,
    ).ok()
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert len(rows) == 6 and rows[0]["prediction"] == "shipping"
    lines = (tmp_path / "messages.csv").read_text().splitlines()
    lines[3] = lines[3].rpartition(",")[0] + ","
    (tmp_path / "messages.csv").write_text("\n".join(lines) + "\n")
    broken = run(train, ["messages.yaml", "--run.dir", "runs/broken"], folder=tmp_path)
    assert broken.codes == [2] and not (tmp_path / "runs" / "broken").exists()
    (message,) = (line for line in text.splitlines() if line.startswith("oneloop: messages.csv"))
    assert message in broken.output
    program(tmp_path, "make_shapes.py")
    run(train, [*command(text, "shapes.yaml"), "--duration", "5", *QUIET], folder=tmp_path).ok()
    run(
        apply,
        ["predict", "runs/shapes", "--data", "new_shapes", "--to", "shapes.csv"],
        folder=tmp_path,
    ).ok()
    assert len(list(csv.DictReader((tmp_path / "shapes.csv").open()))) == 6


def test_an_own_model(tmp_path):
    text = lay_out("own-model.md", tmp_path)
    run(train, [*command(text, "cells.py:Cells --duration"), *QUIET], folder=tmp_path).ok()
    assert summary(tmp_path / "runs" / "cells")["eval/accuracy"] > 0.95
    program(tmp_path, "new_cells.py")
    run(
        apply,
        ["predict", "runs/cells", "--data", "new_cells.csv", "--to", "benign.csv"],
        folder=tmp_path,
    ).ok()
    assert all(
        float(row["benign"]) < 0.01 for row in csv.DictReader((tmp_path / "benign.csv").open())
    )


def test_a_contrastive_loss(tmp_path):
    text = lay_out("own-loss.md", tmp_path)
    world = run(train, [*command(text, "contrast.py"), *QUIET], folder=tmp_path)
    world.ok()
    (line,) = (
        line
        for line in text.splitlines()
        if line.startswith("any parallel layout gives the same gradients")
    )
    assert line in world.output and summary(tmp_path / "runs" / "contrast")["eval/recall@1"] > 0.35


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_chats_with_lora(tmp_path):
    text = lay_out("chats-lora.md", tmp_path)
    run(train, [*command(text, "sft --duration 400"), *QUIET], folder=tmp_path, timeout=300).ok()
    program(tmp_path, "make_chats.py")
    run(train, [*command(text, "sft --task.data"), *QUIET], folder=tmp_path, timeout=200).ok()
    assert summary(tmp_path / "runs" / "chats")["eval/accuracy"] > 0.6
    words = ["predict", "runs/chats", "--data", "questions.jsonl", "--to", "answers.jsonl"]
    run(apply, words, folder=tmp_path).ok()
    answers = [
        json.loads(line)["answer"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()
    ]
    assert len(answers) == 5 and all(
        " plus " in answer or answer.startswith("Not ") for answer in answers
    )


@pytest.fixture(scope="module")
def houses(tmp_path_factory) -> Path:
    """Return a folder with the programs of the page, their data and a run."""
    folder = tmp_path_factory.mktemp("houses")
    for name, content in blocks("how-to/tabular.md", "python").items():
        (folder / name).write_text(content)
    program(folder, "make_houses.py")
    run(train, words_of_houses(), folder=folder).ok()
    return folder


def words_of_houses() -> list[str]:
    text = (ROOT / "docs" / "how-to" / "tabular.md").read_text()
    return [*command(text, "houses.py"), "--duration", "20ep", *QUIET]


@pytest.mark.slow
def test_metrics_of_tabular_data_on_two_processes(houses):
    words = [*words_of_houses(), "--run.dir", "runs/two"]
    run(train, words, ranks=2, folder=houses).ok()
    one, two = (summary(houses / "runs" / name) for name in ("houses", "two"))
    assert two["eval/price_error"] == pytest.approx(one["eval/price_error"], rel=1e-4)


def test_constant_and_empty_columns_and_dates_of_tabular_data(tmp_path):
    """In process: the program with two more columns of numbers, and the lines about dates."""
    program_of_task, dates = blocks_of_tabular()
    table = pandas.DataFrame({"constant": [2.5] * 40, "empty": [None] * 40})
    table["sold"] = ["2000-01-31", "2024-03-01", "", "soon"] * 10
    values: dict[str, Any] = {"pandas": pandas, "table": table}
    exec(dates, values)
    assert table["days"][:2].tolist() == [30, 8826] and table["days"][2:4].isna().all()
    assert table["month"][:2].tolist() == [1, 3]

    # The two columns have no effect, and all outputs are finite.
    exec(program_of_task, values)
    values["NUMBERS"][:] = ["constant", "empty", "days"]
    numbers = torch.tensor(table[values["NUMBERS"]].to_numpy("float32"))
    net = values["Net"](numbers, torch.ones(40), 1)
    category = torch.zeros(40, dtype=torch.int64)
    assert all(output.isfinite().all() for output in net(numbers, category))
    assert net.std[:2].tolist() == [1.0, 1.0] and net.std[2] > 1000


def blocks_of_tabular() -> tuple[str, str]:
    """Return the program of the task and the lines about dates of the page."""
    text = (ROOT / "docs" / "how-to" / "tabular.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return programs[1], programs[2]


def test_tabular_data_with_missing_values_and_two_targets(houses, tmp_path):
    """Also rows that the training data does not have: a new category, a missing one, and missing
    numbers."""
    shutil.copytree(houses, tmp_path, dirs_exist_ok=True)
    one = summary(tmp_path / "runs" / "houses")
    assert one["eval/price_error"] < 20 and one["eval/quick_accuracy"] > 0.9
    assert "train/quick_loss" in (tmp_path / "runs" / "houses" / "metrics.jsonl").read_text()
    with (tmp_path / "new_houses.csv").open("a") as file:
        file.write("80.0,,center\n,1950,lake\n100.0,1990,\n")
    run(
        apply,
        ["predict", "runs/houses", "--data", "new_houses.csv", "--to", "prices.csv"],
        folder=tmp_path,
    ).ok()
    rows = list(csv.DictReader((tmp_path / "prices.csv").open()))
    assert len(rows) == 6 and list(rows[0]) == ["row", "price", "quick_probability"]
    assert all(
        float(row["price"]) > 0 and 0 <= float(row["quick_probability"]) <= 1 for row in rows
    )
