"""The recipes of docs/own-data.md, as they stand there, on files like those they name."""

from __future__ import annotations

import csv
import json
import re

import pytest

from own_files import images, rows, write
from worlds import ROOT, run, train

PAGE = (ROOT / "docs" / "own-data.md").read_text()
RECIPES = dict(re.findall(r"```yaml\n# (\S+\.yaml)\n(.*?)```", PAGE, re.DOTALL))
SPLITS = {
    "reviews.yaml": ("ddp", 2),
    "scores.yaml": ("fsdp2", 2),
    "names.yaml": ("ddp", 2),
    "photos.yaml": ("single", 1),
    "mixture.yaml": ("fsdp2", 2),
}
SMALL = ["--task.layers", "1", "--task.heads", "2", "--task.width", "16"]


@pytest.fixture
def folder(tmp_path):
    """What the recipes name, beside them."""
    for name, text in RECIPES.items():
        (tmp_path / name).write_text(text)
    made = rows(120)
    reviews = [{"body": row["text"], "title": row["label"], "stars": n % 5} for n, row in enumerate(made)]
    write(tmp_path / "reviews", "parquet", reviews)
    with (tmp_path / "scores.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["body", "score"])
        lines.writerows([f"{row['text']}, as it is", row["number"]] for row in made)
    write(tmp_path / "names", "jsonl", [{"words": row["tokens"], "kinds": row["tags"]} for row in made])
    for part in ("train", "validation"):
        images(tmp_path / "photos" / part, "folders", each=12)
    write(tmp_path / "books", "parquet", made)
    write(tmp_path / "talk", "text", made[:30])
    (tmp_path / "code.jsonl").write_text("".join(json.dumps({"source": row["text"] * 9}) + "\n" for row in made))
    return tmp_path


def test_every_recipe_of_the_page_is_run():
    assert RECIPES.keys() == SPLITS.keys()


@pytest.mark.parametrize("recipe", SPLITS)
def test_a_recipe_of_the_page_trains(folder, recipe):
    config, ranks = SPLITS[recipe]
    words = [recipe, "--run.dir", "run", *(SMALL if recipe != "photos.yaml" else []), "--track", "none"]
    run(train, words, ranks=ranks, config=config, folder=folder).ok()
    ended = json.loads((folder / "run" / "summary.json").read_text())
    assert ended["exit_code"] == 0
    figure = {"scores.yaml": "spearman", "mixture.yaml": "loss/chat"}.get(recipe, "macro_f1")
    assert any(name == f"eval/{figure}" for name in ended), ended
