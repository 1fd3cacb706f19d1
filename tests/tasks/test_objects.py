"""Objects in rows: their fields are columns by dotted names, and they are never trained as text."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from oneloop.tasks.rows.open_data import Source, whole
from oneloop.tasks.rows.rows import draw
from oneloop.tasks.seq2seq import Seq2Seq
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_regression import TextRegression

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.objects",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.rows.arrow_tables",
    "oneloop.tasks.rows.parquet_files",
    "oneloop.tasks.language.messages_as_json",
)

KINDS = ("jsonl", "parquet", "arrow")
SMALL: dict[str, Any] = {"layers": 1, "heads": 1, "width": 8, "length": 16}
WMT = [{"translation": {"en": f"word {n}", "de": f"Wort {n}"}, "id": n} for n in range(30)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path_factory.mktemp("cache")))


def written(folder: Path, rows: list[Any], kind: str = "jsonl", features: Any = None) -> Path:
    """Write rows as one file of training data."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"train.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "parquet":
        Dataset.from_list(rows, features).to_parquet(file, batch_size=7)
    else:
        Dataset.from_list(rows, features).save_to_disk(folder / "saved")
        next((folder / "saved").glob("*.arrow")).rename(file)
        for other in (folder / "saved").iterdir():
            other.unlink()
        (folder / "saved").rmdir()
    return folder


def rows_of(folder: Path, **columns: str) -> Any:
    return whole(Source(str(folder), columns), window=16).parts["all"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_of_objects_is_a_column(tmp_path, kind):
    rows = rows_of(written(tmp_path, WMT, kind), source="translation.en", number="id")
    assert [rows[n] for n in (0, 29)] == [
        {"translation.en": "word 0", "id": 0},
        {"translation.en": "word 29", "id": 29},
    ]
    assert sorted(rows.types) == ["id", "translation.en"]
    found = [text for array in rows.values("translation.en") for text in array.to_pylist()]
    assert found == [row["translation"]["en"] for row in WMT]
    some = rows.select(np.array([3, 4, 8]))
    again = pickle.loads(pickle.dumps(some))
    assert [again[n]["translation.en"] for n in range(3)] == ["word 3", "word 4", "word 8"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_splits_and_samples_are_those_of_flat_columns(tmp_path, kind):
    flat = [{"s": row["translation"]["en"], "t": row["translation"]["de"]} for row in WMT]
    keys = {"source": "translation.en", "target": "translation.de"}
    nested = Seq2Seq(data=str(written(tmp_path / "a", WMT, kind)), **keys, width=8, held_out=0.1)
    plain = Seq2Seq(
        data=str(written(tmp_path / "b", flat)), source="s", target="t", width=8, held_out=0.1
    )
    for task, names in ((nested, keys.values()), (plain, ("s", "t"))):
        draws = [draw(sorted(names), sorted(row.values(), reverse=True)) for row in flat]
        assert len(set(draws)) > 20
        sizes = [len(task.train_set()), *map(len, task.eval_sets().values())]
        assert sum(sizes) == 30
    everything = nested.samples_of(str(tmp_path / "a"), labelled=True)
    for index in range(30):
        texts = [nested._answer(part.tolist()) for part in everything[index]]
        assert texts == [f"word {index}", f"Wort {index}"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_depth_and_a_flat_column_first(tmp_path, kind):
    rows = [
        {"a": {"b": {"c.d": f"deep {n}", "x": None}}, "a.b": f"flat {n}", "e": {"f": {"g": n}}}
        for n in range(9)
    ]
    read = rows_of(written(tmp_path, rows, kind), one="a.b.c.d", two="a.b", three="e.f.g")
    assert read[4] == {"a.b.c.d": "deep 4", "a.b": "flat 4", "e.f.g": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_without_its_object_is_missing(tmp_path, kind):
    rows = [*WMT[:5], {"translation": None, "id": 5}, *WMT[6:]]
    data = str(written(tmp_path, rows, kind))
    assert rows_of(tmp_path, text="translation.en")[5] == {"translation.en": None}
    assert rows_of(tmp_path, text="translation.en")[6] == {"translation.en": "word 6"}
    with pytest.raises(ValueError, match="row 5.* has no value in 'translation.en'; fill it"):
        TextClassification(data=data, text="translation.en", label="id", **SMALL)
    with pytest.raises(ValueError, match="row 5: the source is nothing"):
        Seq2Seq(data=data, source="translation.en", target="translation.de", width=8)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_answered_with_the_known_ones(tmp_path, kind):
    data = str(written(tmp_path, WMT, kind))
    with pytest.raises(ValueError, match=r"no column 'translation\.fr'; it has ") as caught:
        Seq2Seq(data=data, source="translation.fr", target="translation.de", width=8)
    for known in ("translation", "translation.en", "translation.de", "task.source"):
        assert known in str(caught.value)
    with pytest.raises(ValueError, match=r"no column 'id\.x'; it has"):
        rows_of(tmp_path, text="id.x")


@pytest.mark.parametrize("kind", KINDS)
def test_labels_and_numbers_in_objects(tmp_path, kind):
    rows = [
        {"text": f"t {n}", "meta": {"info": {"label": n % 2, "score": n / 4}}} for n in range(40)
    ]
    features = None
    names = ["0", "1"]
    if kind != "jsonl":
        names = ["no", "yes"]
        info = {"label": ClassLabel(names=names), "score": Value("float64")}
        features = Features({"text": Value("string"), "meta": {"info": info}})
    data = str(written(tmp_path, rows, kind, features))
    task = TextClassification(data=data, label="meta.info.label", **SMALL)
    assert [*task.classes] == names
    task = TextRegression(data=data, label="meta.info.score", **SMALL)
    found = [
        number
        for part in task._sets.values()
        for _, number in map(part.__getitem__, range(len(part)))
    ]
    assert sorted(found) == [n / 4 for n in range(40)]


def test_a_flat_text_beside_unreadable_objects_is_read_and_the_field_is_skipped(tmp_path):
    lines = [json.dumps(row) + "\n" for row in WMT]
    lines[4] = '{"translation": {"en": "\\ud800", "de": "x"}, "id": 4}\n'
    tmp_path.joinpath("train.jsonl").write_text("".join(lines))
    assert rows_of(tmp_path, number="id")[4] == {"id": 4}
    with pytest.raises(ValueError, match="line 5: 'translation' is not valid Unicode"):
        rows_of(tmp_path, source="translation.en")
    source = Source(str(tmp_path), {"source": "translation.en"}, skipped=[])
    assert len(whole(source, window=16).parts["all"]) == 29


# --- objects are no texts

OBJECTS = {
    "an object": {"a": 1},
    "a message": {"role": "assistant", "content": "x"},
    "a list of texts": ["x"],
    "an empty list of objects": [],
    "a list of objects": [{"a": "x"}],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_as_a_target_is_rejected(tmp_path, kind, name):
    rows = [{"source": f"s {n}", "target": OBJECTS[name]} for n in range(20)]
    if name == "an empty list of objects":
        rows[1]["target"] = [{"a": "x"}]
    with pytest.raises(ValueError, match=r"row \d+: the target is .*; task.target must name texts"):
        Seq2Seq(data=str(written(tmp_path, rows, kind)), width=8)


def test_a_text_that_is_json_stays_one_beside_objects(tmp_path):
    targets = ['{"a": 1}', '[{"role": "user", "content": "x"}]', '"quoted"', "5", "", "plain", None]
    rows = [{"source": f"s {n}", "target": targets[n % 7]} for n in range(28)]
    written(tmp_path / "texts", rows)
    written(tmp_path / "objects", [*rows, {"source": "s", "target": {"a": 1, "b": None}}])
    texts, mixed = (rows_of(tmp_path / name, target="target") for name in ("texts", "objects"))
    assert [mixed[n] for n in range(28)] == [texts[n] for n in range(28)]
    assert mixed[28] == {"target": {"a": 1, "b": None}}

    # The one object is rejected by its row; the texts around it are trained.
    full = [row for row in rows if row["target"]]
    data = str(written(tmp_path / "full", [*full, {"source": "s", "target": {"a": 1, "b": None}}]))
    with pytest.raises(ValueError, match=r"row 20: the target is \{'a': 1, 'b': None\}; task"):
        Seq2Seq(data=data, width=8)
    task = Seq2Seq(data=data, width=8, unreadable="skip")
    sizes = [len(task.train_set()), *map(len, task.eval_sets().values())]
    assert sum(sizes) == 20 and len(task.skipped_rows) == 1
