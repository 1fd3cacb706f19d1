"""Class names in several Unicode forms, with blanks, and in upper and lower case."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image

from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.token_classification import TokenClassification

pytestmark = pytest.mark.covers(
    "oneloop.tasks.image_classification",
    "oneloop.tasks.labels",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_rows",
    "oneloop.tasks.token_classification",
)

SMALL: dict[str, Any] = {"model": "bytes", "layers": 1, "heads": 2, "width": 16, "length": 64}
COMPOSED = "café"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))


def texts(folder: Path, labels: list[str], *, tags: bool = False) -> str:
    folder.mkdir(parents=True)
    rows = []
    for number in range(60):
        label = labels[number % len(labels)]
        row: dict[str, Any] = {"text": f"t {number}", "label": label}
        if tags:
            row = {"tokens": ["a", str(number)], "tags": ["other", label]}
        rows.append(json.dumps(row) + "\n")
    (folder / "train.jsonl").write_text("".join(rows))
    return str(folder)


def test_folders_of_one_class_in_two_forms(tmp_path):
    for part, form in (("train", "NFC"), ("validation", "NFD")):
        for label in (unicodedata.normalize(form, COMPOSED), "tea"):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for number in range(6):
                pixels = np.random.default_rng(number).integers(0, 255, (16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    task = ImageClassification(str(tmp_path / "images"), model="cnn", width=8, image_size=16)
    assert task.classes == [COMPOSED, "tea"]
    labels = [task.eval_sets()["validation"][number][1] for number in range(12)]
    assert sorted(labels) == [0] * 6 + [1] * 6
    assert any("several Unicode forms" in note and COMPOSED in note for note in task.notes)


def test_rows_in_two_forms_are_one_class(tmp_path):
    both = [COMPOSED, "tea", DECOMPOSED, "tea"]
    task = TextClassification(texts(tmp_path / "both", both), **SMALL)
    assert task.classes == [COMPOSED, "tea"]
    tokens = TokenClassification(texts(tmp_path / "tags", both, tags=True), **SMALL)
    assert tokens.classes == [COMPOSED, "other", "tea"]
    for name in (COMPOSED, DECOMPOSED):  # also in data to evaluate
        again = task.samples_of(texts(tmp_path / name, [name]), labelled=True)
        assert {again[number][1] for number in range(len(again))} == {0}


def test_a_class_in_one_form_keeps_its_name_and_number(tmp_path):
    """The decomposed name is sorted by its letters: before cafz, and not after it."""
    for number, (name, order) in enumerate(((DECOMPOSED, 0), (COMPOSED, 1))):
        task = TextClassification(texts(tmp_path / f"{number}", [name, "cafz"]), **SMALL)
        assert task.classes[order] == name and not any("Unicode" in note for note in task.notes)


def about_classes(task):
    [line] = [note for note in task.notes if " classes: " in note]
    return line


def test_a_line_lists_the_classes(tmp_path):
    """Their number, the first ones in order of their numbers, and the column."""
    where = texts(tmp_path / "texts", ["10", "9"])
    line = about_classes(TextClassification(where, **SMALL))
    assert line == f"2 classes: ['9', '10'], from the column 'label' of {where}"
    where = texts(tmp_path / "tags", [f"c{number}" for number in range(8)], tags=True)
    line = about_classes(TokenClassification(where, **SMALL))
    shown = "['c0', 'c1', 'c2', 'c3', 'c4', 'c5', ...]"
    assert line == f"9 classes: {shown}, from the column 'tags' of {where}"

    # Two sources with a ClassLabel.
    kinds = Features({"text": Value("string"), "label": ClassLabel(names=["ham", "spam"])})
    both = []
    for name in "xy":
        rows = {"text": [f"{name} {n}" for n in range(60)], "label": [0, 1] * 30}
        Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / name)
        both.append({"data": str(tmp_path / name)})
    line = about_classes(TextClassification(both, **SMALL))
    origins = " and ".join(f"the ClassLabel 'label' of {tmp_path / name}" for name in "xy")
    assert line == f"2 classes: ['ham', 'spam'], from {origins}"
