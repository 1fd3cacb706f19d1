"""Objects in rows: their fields are columns by dotted names, and they are never trained as text."""

from __future__ import annotations

import json
import pickle
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from PIL import Image
from pyarrow import parquet

from chats import tokenizer_of, turns
from oneloop.tasks.language.chat import Chat
from oneloop.tasks.language.completions import whole_text
from oneloop.tasks.language.conversations import conversation, encoded, holds_texts
from oneloop.tasks.language.pairs import encoded_pair
from oneloop.tasks.rows.objects import Written, down_to
from oneloop.tasks.rows.open_data import Source, whole
from oneloop.tasks.rows.remote.remote_file import RemoteFile
from oneloop.tasks.rows.remote.store import RemoteObject
from oneloop.tasks.seq2seq import Seq2Seq
from oneloop.tasks.sft import SFT
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_regression import TextRegression
from oneloop.tools.check.check_data import check_data

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.objects",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.rows.arrow_tables",
    "oneloop.tasks.rows.parquet_files",
    "oneloop.tasks.rows.image_rows",
    "oneloop.tasks.rows.remote.remote_file",
    "oneloop.tasks.language.messages_as_json",
)

KINDS = ("jsonl", "parquet", "arrow")
SMALL: dict[str, Any] = {"layers": 1, "heads": 1, "width": 8, "length": 16}
WMT = [{"translation": {"en": f"word {n}", "de": f"Wort {n}"}, "id": n} for n in range(30)]


@pytest.fixture(autouse=True, scope="module")
def _one_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONELOOP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


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
def test_the_samples_are_those_of_flat_columns(tmp_path, kind):
    flat = [{"s": row["translation"]["en"], "t": row["translation"]["de"]} for row in WMT]
    keys = {"source": "translation.en", "target": "translation.de"}
    nested = Seq2Seq(data=str(written(tmp_path / "a", WMT, kind)), **keys, width=8, held_out=0.1)
    plain = Seq2Seq(
        data=str(written(tmp_path / "b", flat)), source="s", target="t", width=8, held_out=0.1
    )
    for task in (nested, plain):
        assert sum([len(task.train_set()), *map(len, task.eval_sets().values())]) == 30
    everything = nested.samples_of(str(tmp_path / "a"), labelled=True)
    for index in range(30):
        texts = [nested._answer(part.tolist()) for part in everything[index].documents]
        assert texts == [f"word {index}", f"Wort {index}"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_depth_and_a_flat_column_first(tmp_path, kind):
    rows = [
        {"a": {"b": {"c.d": f"deep {n}", "x": None}}, "a.b": f"flat {n}", "e": {"f": {"g": n}}}
        for n in range(9)
    ]
    read = rows_of(written(tmp_path / "a", rows, kind), one="a.b.c.d", two="a.b", three="e.f.g")
    assert read[4] == {"a.b.c.d": "deep 4", "a.b": "flat 4", "e.f.g": 4}
    clash = [{"a.b": {"c": "longer"}, "a": {"b": {"c": "shorter"}}}] * 3
    assert rows_of(written(tmp_path / "b", clash, kind), one="a.b.c")[0] == {"a.b.c": "longer"}


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


def test_remote_fields_need_only_their_bytes(tmp_path):
    """The gap between both columns is small; pyarrow would read it, too."""
    rows = [
        {"translation": {"de": f"Wort {n % 3}", "en": f"{n} word" * 50}, "meta": {"n": n}}
        for n in range(40)
    ]
    rows[5]["translation"] = None
    content = (written(tmp_path, rows, "parquet") / "train.parquet").read_bytes()
    metadata = parquet.ParquetFile(tmp_path / "train.parquet").metadata
    columns = ["translation.de", "meta.n"]
    parts = {}
    item = RemoteObject("train.parquet", len(content), "1")
    file = RemoteFile("", item, "train.parquet", metadata, "")
    for start, end in file.ranges(0, columns):
        parts[start, end] = content[start:end]
    assert len(parts) == 2
    with pytest.raises(ValueError, match="train.parquet: row group 0 cannot be read"):
        file.decoded(0, columns, {(start, end): content[start:end]})
    table = file.decoded(0, columns, parts)
    for column, expected in (
        (columns[0], [None if n == 5 else f"Wort {n % 3}" for n in range(7)]),
        (columns[1], [*range(7)]),
    ):
        found = down_to(table, column, "").column(column).to_pylist()
        assert found == expected


def test_rows_to_predict_and_a_check_read_fields(tmp_path):
    rows = [{"a": {"text": f"t {n}", "label": "xy"[n % 2]}} for n in range(40)]
    keys = {"text": "a.text", "label": "a.label"}
    task = TextClassification(data=str(written(tmp_path / "train", rows)), **keys, **SMALL)
    new = str(written(tmp_path / "new", [{"a": {"text": "new"}}] * 3, "parquet"))
    assert len(task.samples_of(new, labelled=False)) == 3
    words = [f"--task.{key}={name}" for key, name in keys.items()]
    rows[3]["a"]["text"] = None
    data = f"--task.data={written(tmp_path / 'bad', rows)}"
    findings = check_data("snippets", [data, *words, "--task.model=bytes"])
    assert "has no value in 'a.text'" in str(findings.unusable)
    findings = check_data(str(tmp_path / "bad"))  # without a recipe: no column is known
    assert findings.rows == 40 and not findings.unusable


def test_metadata_of_images_may_have_objects(tmp_path):
    for n in range(12):
        Image.new("RGB", (4, 4), (n, 0, 0)).save(tmp_path / f"{n}.png")
    lines = [{"file_name": f"{n}.png", "about": {"label": "ab"[n % 2]}} for n in range(12)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    rows = rows_of(tmp_path, image="image", label="about.label")
    assert sorted(rows[n]["about.label"] for n in range(12)) == ["a"] * 6 + ["b"] * 6


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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tokens_of(folder: Path, *answers: str, prefix: str = "", **more: str) -> list[list[int]]:
    """Return the tokens of all rows, as sft or preference makes them."""
    names = {name: prefix + name for name in ("prompt", *answers)} | more
    rows = rows_of(folder, **names)
    tokenizer = tokenizer_of("ours")
    columns = {"messages": "", "tools": "", **names}
    if "chosen" in answers:
        make = partial(encoded_pair, length=200)
    else:
        make = encoded
    made = []
    for index in range(len(rows)):
        made.append(make(rows[index], columns, tokenizer, Chat(tokenizer)).tolist())
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("answers", [("completion",), ("chosen", "rejected")], ids=len)
def test_one_message_is_a_list_of_one(tmp_path, kind, answers):
    rows = []
    for n in range(3):
        row = {"prompt": user(f"what is {n}?")}
        rows.append(row | {name: assistant(f"{name} {n}") for name in answers})
    lists = [{name: [message] for name, message in row.items()} for row in rows]
    nested = [{"data": row, "prompt": "another"} for row in rows]
    expected = tokens_of(written(tmp_path / "lists", lists), *answers)
    assert tokens_of(written(tmp_path / "one", rows, kind), *answers) == expected
    folder = written(tmp_path / "nested", nested, kind)
    assert tokens_of(folder, *answers, prefix="data.") == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            {"prompt": "q", "completion": {"a": "x"}},
            "the prompt is 'q', and the completion {'a': 'x'}; both must be texts, or both",
        ),
        (
            {"prompt": {"a": "q"}, "completion": "x"},
            "the prompt is {'a': 'q'}, and the completion 'x'; both must be texts",
        ),
        ({"prompt": {"a": "q"}, "completion": {"a": "x"}}, "expected a list of messages, got {'a'"),
        ({"prompt": ["q"], "completion": ["x"]}, "message 0 must have role and content, got 'q'"),
        ({"prompt": user("q"), "completion": None}, "expected a list of messages, got nothing"),
        (
            {"prompt": "q", "chosen": {"a": "x"}, "rejected": {"a": "y"}},
            "chosen: expected a list of messages, got {'a': 'x'}; a message has role and content",
        ),
    ],
)
def test_other_objects_are_neither_texts_nor_messages(tmp_path, kind, row, why):
    folder = written(tmp_path, [row, row], kind)
    answers = [name for name in row if name != "prompt"]
    with pytest.raises(ValueError, match=f"^{re.escape(why)}"):
        tokens_of(folder, *answers)


def test_the_first_bad_object_does_not_hide_that_the_rows_are_conversations(tmp_path):
    rows = [{"prompt": user(f"{n}"), "completion": assistant("x")} for n in range(20)]
    for row in rows[:9]:
        row["prompt"] = {"a": "q"}
    task = SFT(
        data=str(written(tmp_path, rows)), width=8, layers=1, heads=1, unreadable="skip", length=99
    )
    assert len(task.skipped_rows) == 9


def test_a_text_of_json_is_trained_as_it_is(tmp_path):
    rows = [{"prompt": f"{n}", "completion": json.dumps({"a": n})} for n in range(20)]
    task = SFT(data=str(written(tmp_path, rows)), width=8, layers=1, heads=1, pack="padded")
    (tokens,) = task.train_set()[0].documents
    text = task.decode(np.where(tokens < 0, ~tokens, tokens).tolist())
    assert '{"a": ' in text and not task.rows.chat


def test_a_whole_text_is_no_object():
    for value in ({"a": 1}, ["x"], None, 5):
        with pytest.raises(ValueError, match="expected a text, got"):
            whole_text(tokenizer_of("ours"), value)


def test_nulls_of_json_stay_and_those_of_a_table_go():
    written_ = json.loads(
        '{"role": "user", "content": "x", "more": {"a": null}}', object_hook=Written
    )
    assert conversation([written_])[0]["more"] == {"a": None}
    assert conversation([dict(written_) | {"more": {"a": None}}])[0]["more"] == {}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, "", "a", turns("a")], True),
        ([None, {"a": 1}, turns("a"), "a"], False),
        ([None, ""], True),
        ([None, {"a": 1}], True),
        ([None, None], False),
    ],
)
def test_the_first_text_or_messages_of_a_column_decides(values, expected):
    """Empty texts need no chat template: a begin token may stand before their completions."""
    assert holds_texts([{"column": value} for value in values], "column") is expected
