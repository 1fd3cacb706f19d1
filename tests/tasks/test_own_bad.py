"""Errors in user data files: one message, code 2, nothing written. How rows are split and
prepared."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from failing_disks import full_disk
from oneloop.basics.exit_codes import BadInput
from oneloop.tasks.language.tokens import ending_tokenizer
from oneloop.tasks.rows.arrow_tables import table_of
from oneloop.tasks.rows.cached_arrays import ragged
from oneloop.tasks.rows.find_files import found as found_files
from oneloop.tasks.rows.open_data import named_sources, opened
from oneloop.tasks.rows.rewrite import main as rewrite
from oneloop.tasks.rows.rows import divided
from own_files import bulk, images, rows, write
from worlds import each_message, run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.mixture",
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.labels",
    "oneloop.tasks.rows.cached_arrays",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.image_rows",
    "oneloop.tasks.rows.images",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.rows.parquet",
    "oneloop.tasks.rows.rewrite",
    "oneloop.tasks.rows.rows",
)

SMALL = ["--task.layers", "1", "--task.heads", "2", "--task.width", "16"]
COMMON = [
    "--duration",
    "8",
    "--batch.size",
    "8",
    "--eval.every",
    "0",
    "--track",
    "none",
    "--run.dir",
    "run",
]
TEXTS = ["digits", "--task", "text_classification", *SMALL, "--task.length", "16", *COMMON]
PICTURES = ["digits", "--task.width", "8", "--task.image_size", "8", *COMMON]


def parted(folder: Path, **parts: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    for part, made in parts.items():
        (folder / f"{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made))
    return folder


def without_label(folder: Path) -> list[str]:
    made = rows(90)
    made[41]["label"] = None
    write(folder, "parquet", made)
    return ["part-1.parquet, row 11 has no value in 'label'"]


def a_class_never_trained_on(folder: Path) -> list[str]:
    parted(folder, train=rows(30), validation=[*rows(6), {**rows(1)[0], "label": "omega"}])
    return ["labels ['omega'] occur in validation but not in train"]


def no_part_to_train_on(folder: Path) -> list[str]:
    parted(folder, validation=rows(6), test=rows(3))
    return ["has files of test, validation, but no training data"]


def a_cut_file(folder: Path) -> list[str]:
    write(folder, "parquet", rows(90))
    file = folder / "part-1.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    return ["part-1.parquet cannot be read as parquet"]


def a_spoiled_group(folder: Path) -> list[str]:
    write(folder, "parquet", rows(90))
    file = folder / "part-1.parquet"
    file.write_bytes(b"PAR1" + b"\xff" * 2000 + file.read_bytes()[2004:])
    return ["part-1.parquet: row group 0 cannot be read"]


def a_broken_line(folder: Path) -> list[str]:
    parted(folder, train=rows(30), validation=rows(6))
    (folder / "train.jsonl").write_text((folder / "train.jsonl").read_text() + '{"text": "cut')
    return ["train.jsonl, line 31: not JSON"]


def another_schema(folder: Path) -> list[str]:
    write(folder, "parquet", rows(90))
    parquet.write_table(
        pa.table({"text": [1, 2], "label": ["alpha", "beta"]}), folder / "part-7.parquet"
    )
    return ["part-7.parquet: column 'text' has type", "write the files with one schema"]


def an_empty_set(folder: Path) -> list[str]:
    parted(folder, train=rows(30), validation=rows(6))
    folder.joinpath("more").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows(1)).slice(0, 0), folder / "more" / "none.parquet")
    for name in ("train", "validation"):
        (folder / f"{name}.jsonl").unlink()
    return ["the whole set is empty"]


def nothing_there(folder: Path) -> list[str]:
    return ["data' is not a file or folder"]


def several_kinds(folder: Path) -> list[str]:
    write(folder, "parquet", rows(30))
    write(folder, "csv", rows(30))
    return ["holds files of several kinds: 3 of csv (part-0.csv) and 3 of parquet (part-0.parquet)"]


def a_large_group(folder: Path) -> list[str]:
    bulk(folder, megabytes=3, files=1, group=3000)
    return [
        "part-000.parquet: row group 0 has 3,000 rows of 2.8 MB, and task.window is 1 MB",
        "--rows 67",
    ]


BAD = {
    "no such column": (
        lambda folder: write(folder, "parquet", rows(30)) and ["has no column 'body'; it has text"],
        ["--task.text", "body"],
    ),
    "a nested column": (
        lambda folder: (
            write(folder, "parquet", rows(30))
            and ["'tags' holds lists of string; expected one label"]
        ),
        ["--task.label", "tags"],
    ),
    "numbers as classes": (
        lambda folder: write(folder, "parquet", rows(30)) and ["'number' holds values of float64"],
        ["--task.label", "number"],
    ),
    "numbers as text": (
        lambda folder: (
            write(folder, "parquet", rows(30))
            and ["'number' holds values of float64; expected text"]
        ),
        ["--task.text", "number"],
    ),
    "too much held out": (
        lambda folder: (
            write(folder, "parquet", rows(30)) and ["task.held_out 0.7 must be between 0 and 0.5"]
        ),
        ["--task.held_out", "0.7"],
    ),
    "no window": (
        lambda folder: (
            write(folder, "parquet", rows(30)) and ["task.window 0 must be a positive number"]
        ),
        ["--task.window", "0"],
    ),
    "a row without a label": (without_label, []),
    "a class seen only in validation": (a_class_never_trained_on, []),
    "a part that is not there": (no_part_to_train_on, []),
    "a cut file": (a_cut_file, []),
    "a spoiled group": (a_spoiled_group, []),
    "a broken line": (a_broken_line, []),
    "another schema": (another_schema, []),
    "an empty set": (an_empty_set, []),
    "nothing there": (nothing_there, []),
    "several kinds": (several_kinds, []),
    "a group larger than the window": (a_large_group, ["--task.window", "1", "--task.label", "id"]),
}


@pytest.fixture(scope="module")
def messages_of_data(tmp_path_factory) -> dict[str, tuple[Path, list[str], Any, str]]:
    """Return the folder, expected texts, exit code and output of each kind of bad data.

    One process runs all of them, each on files of its own.
    """
    top = tmp_path_factory.mktemp("bad")
    several, expected = [], []
    for name, (lay, options) in BAD.items():
        (top / name).mkdir()
        expected.append(lay(top / name / "data"))
        places = ["--task.data", str(top / name / "data"), "--run.dir", str(top / name / "run")]
        several.append([*TEXTS, *places, *options])
    world = run(each_message, several, folder=top)
    (found,) = world.ok()
    assert world.output == "--- rank 0\n"  # nothing is written past the messages
    by_name = {}
    for name, texts, (code, output) in zip(BAD, expected, found, strict=True):
        by_name[name] = (top / name, texts, code, output)
    return by_name


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_reported(messages_of_data, name):
    folder, expected_text, code, output = messages_of_data[name]
    assert code == 2 and all(word in output for word in expected_text), output
    assert "Traceback" not in output and len(output.splitlines()) <= 2, output
    assert not (folder / "run").exists()


def pictures_that_cannot_be_read(folder: Path) -> str:
    images(folder, "folders", each=8)
    for file in folder.rglob("*.png"):  # the first file in any order
        file.write_bytes(file.read_bytes()[:40])
    return ".png cannot be read as an image"


def pictures_of_one_class(folder: Path) -> str:
    images(folder, "folders", each=8)
    for file in folder.rglob("*.png"):
        file.rename(folder / file.name)
    return "'label' holds one class (data); at least two are needed"


def pictures_that_no_row_tells_of(folder: Path) -> str:
    images(folder, "folders", each=8)
    (folder / "metadata.csv").write_text("file_name,label\nalpha/000.png,a\n")
    return "003.png is in no metadata file above it"


def rows_of_pictures_without_their_names(folder: Path) -> str:
    images(folder, "folders", each=8)
    (folder / "metadata.csv").write_text("name,label\nalpha/000.png,a\n")
    return "metadata.csv has no text in a column 'file_name'"


def parts_that_number_their_classes_differently(folder: Path) -> str:
    from datasets import ClassLabel, Dataset, Features, Image

    images(folder, "parquet", each=8)
    rows_of = Dataset.from_parquet(
        str(folder / "pictures.parquet"), cache_dir=str(folder.parent / "cache")
    )
    (folder / "pictures.parquet").rename(folder / "train.parquet")
    other = Features({"image": Image(), "label": ClassLabel(names=["gamma", "beta", "alpha"])})
    Dataset.from_list(
        list(rows_of.cast_column("image", Image(decode=False))), features=other
    ).to_parquet(folder / "validation.parquet")
    return "'label' numbers its classes ClassLabel(names=['gamma', 'beta', 'alpha']) in validation"


BAD_PICTURES = [
    pictures_of_one_class,
    pictures_that_no_row_tells_of,
    rows_of_pictures_without_their_names,
    parts_that_number_their_classes_differently,
]


@pytest.fixture(scope="module")
def messages_of_pictures(tmp_path_factory) -> dict[Any, tuple[Path, str, Any, str]]:
    """Return the folder, expected text, exit code and output of each kind of bad pictures.

    One process runs all of them, each on files of its own.
    """
    top = tmp_path_factory.mktemp("pictures")
    kinds = [*BAD_PICTURES, pictures_that_cannot_be_read]
    several, expected = [], []
    for lay in kinds:
        folder = top / lay.__name__
        folder.mkdir()
        expected.append(lay(folder / "data"))
        places = ["--task.data", str(folder / "data"), "--run.dir", str(folder / "run")]
        several.append([*PICTURES, *places])
    (found,) = run(each_message, several, folder=top).ok()
    by_kind = {}
    for lay, text, (code, output) in zip(kinds, expected, found, strict=True):
        by_kind[lay] = (top / lay.__name__, text, code, output)
    return by_kind


def assert_reported(folder: Path, expected_text: str, code: Any, output: str) -> None:
    assert code == 2 and expected_text in output and "Traceback" not in output, output
    assert not (folder / "run").exists()


def test_a_picture_that_cannot_be_read_is_named(messages_of_pictures):
    assert_reported(*messages_of_pictures[pictures_that_cannot_be_read])


@pytest.mark.parametrize("lay", BAD_PICTURES)
def test_pictures_without_classes_are_reported(messages_of_pictures, lay):
    assert_reported(*messages_of_pictures[lay])


MIXED = {
    "a negative weight": (
        [{"data": "A", "weight": -1}, {"data": "B"}],
        "the weights of a mixture are -1.0, 1.0",
    ),
    "nothing but 0": (
        [{"data": "A", "weight": 0}, {"data": "B", "weight": 0}],
        "the weights of a mixture are 0.0, 0.0",
    ),
    "no number": (
        [{"data": "A", "weight": "much"}, {"data": "B"}],
        "the weight 'much' of 'A' is not a number",
    ),
    "no place": ([{"weight": 1}], "has no data"),
    "a strange key": (
        [{"data": "A", "wight": 1}],
        "'wight': unknown entry; known: data, label, name, second, text, weight",
    ),
    "no source": ([], "task.data is an empty list"),
    "twice the same": ([{"data": "A"}, {"data": "A"}], "has two entries named 'A'"),
    "an empty set": ([{"data": "A"}, {"data": "E"}], "'E': the whole set is empty"),
}


@pytest.fixture(scope="module")
def messages_of_mixtures(tmp_path_factory) -> dict[str, tuple[Path, Any, str]]:
    """Return the folder of the run, exit code and output of each bad mixture.

    One process runs all of them on the same data.
    """
    top = tmp_path_factory.mktemp("mixed")
    for number, place in enumerate("AB"):
        write(top / place, "parquet", rows(60, first=60 * number))
    (top / "E").mkdir()
    parquet.write_table(pa.Table.from_pylist(rows(1)).slice(0, 0), top / "E" / "none.parquet")
    several = []
    for name, (data, _) in MIXED.items():
        several.append([*TEXTS, "--task.data", json.dumps(data), "--run.dir", str(top / name)])
    (found,) = run(each_message, several, folder=top).ok()
    by_name = {}
    for name, (code, output) in zip(MIXED, found, strict=True):
        by_name[name] = (top / name, code, output)
    return by_name


@pytest.mark.parametrize("name", MIXED)
def test_bad_mixtures_are_reported(messages_of_mixtures, name):
    folder, code, output = messages_of_mixtures[name]
    _, expected_text = MIXED[name]
    assert code == 2 and expected_text in output and "Traceback" not in output, output
    assert not folder.exists()


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        pytest.param("single", 1, marks=pytest.mark.slow),
        ("ddp", 2),
        pytest.param("fsdp2", 2, marks=pytest.mark.slow),
    ],
)
def test_a_mixture_trains_and_logs_the_loss_of_each_source(tmp_path, config, ranks):
    for number, place in enumerate(("books", "code", "talk")):
        write(tmp_path / place, "parquet" if number else "jsonl", rows(60, first=60 * number))
    data = [
        {"data": place, "weight": weight}
        for place, weight in (("books", 0.7), ("code", 0.2), ("talk", 0.1))
    ]
    words = [*TEXTS, "--task.data", json.dumps(data), "--task.held_out", "0.2", "--eval.every", "4"]
    world = run(train, words, ranks=ranks, config=config, folder=tmp_path)
    world.ok()
    assert "data: mixture: books 70.0% (" in world.output
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    evaluated = [line for line in lines if "eval/loss" in line]
    assert len(evaluated) == 2
    for line in evaluated:
        each = [line[f"eval/loss/{name}"] for name in ("books", "code", "talk")]
        assert min(each) <= line["eval/loss"] <= max(each)


def test_pictures_take_what_a_metadata_file_states(tmp_path):
    images(tmp_path / "data", "folders", each=8)
    files = sorted((tmp_path / "data").rglob("*.png"))
    lines = "".join(
        f"{file.relative_to(tmp_path / 'data')},{'odd' if n % 2 else 'NA'}\n"
        for n, file in enumerate(files)
    )
    (tmp_path / "data" / "metadata.csv").write_text(f"file_name,parity\n{lines}")
    [source] = named_sources(str(tmp_path / "data"), {"image": "image", "label": "parity"})
    parts = opened(source, held_out=0.1, window=4).parts
    found = {
        row["image"]["path"]: row["parity"]
        for part in parts.values()
        for row in (part[i] for i in range(len(part)))
    }
    assert found == {str(file): "odd" if number % 2 else "NA" for number, file in enumerate(files)}
    assert "metadata.csv" in parts["train"].fingerprint()["files"]


def test_names_with_signs_of_a_pattern_are_names(tmp_path):
    write(tmp_path / "data [a]*", "jsonl", rows(30))
    for file in (tmp_path / "data [a]*").glob("*.jsonl"):
        file.rename(file.with_name(f"[{file.stem}]?.jsonl"))
    assert sum(map(len, opened_parts(tmp_path / "data [a]*").values())) == 30


# --- how rows are split and prepared
# ----------------------------------------------------------------------------------


def test_rows_of_the_same_content_are_in_one_part_wherever_they_lie(tmp_path):
    made = rows(400)
    one = opened_parts(write(tmp_path / "one", "parquet", [*made, *made], files=5))
    other = opened_parts(write(tmp_path / "other", "jsonl", made[::-1], files=2))
    assert one.keys() == other.keys() == {"train", "validation", "test"}
    for part in one:
        assert set(one[part]) == set(other[part]) and len(one[part]) == 2 * len(other[part])
    assert 20 < len(other["validation"]) < 60 and 20 < len(other["test"]) < 60
    assert sum(map(len, other.values())) == 400


def opened_parts(folder: Path) -> dict[str, list[str]]:
    [source] = named_sources(str(folder), {"text": "text", "label": "label"})
    parts = opened(source, held_out=0.1, window=4).parts
    return {part: [found[i]["text"] for i in range(len(found))] for part, found in parts.items()}


def test_parts_that_are_there_are_used_and_the_missing_one_is_held_out(tmp_path):
    parted(tmp_path / "a", train=rows(300), test=rows(30, first=300))
    parts = opened_parts(tmp_path / "a")
    assert len(parts["test"]) == 30 and len(parts["train"]) + len(parts["validation"]) == 300
    # it also holds the rows that would have been in the test split
    assert 30 < len(parts["validation"]) < 100


def test_a_row_is_found_by_file_and_number(tmp_path):
    [source] = named_sources(str(write(tmp_path / "a", "parquet", rows(90))), {"text": "text"})
    for found in opened(source, held_out=0.1, window=4).parts.values():
        for index in range(len(found)):
            file, _, row = found.where(index).partition(", row ")
            assert parquet.read_table(file).column("text")[int(row)].as_py() == found[index]["text"]


def test_groups_are_rewritten_by_the_command_that_is_named(tmp_path):
    total = bulk(tmp_path / "data", megabytes=3, files=2, group=1500)
    assert rewrite([str(tmp_path / "data"), str(tmp_path / "new"), "--rows", "62"]) == 0
    # the folder exists
    assert rewrite([str(tmp_path / "data"), str(tmp_path / "new"), "--rows", "62"]) == 2
    [source] = named_sources(str(tmp_path / "new"), {"id": "id", "text": "text"})
    parts = opened(source, held_out=0.1, window=1).parts
    assert sorted(part[i]["id"] for part in parts.values() for i in range(len(part))) == list(
        range(total)
    )


def prepared(folder: str) -> int:
    """Two processes prepare the same data; the first one takes longer than a collective would
    wait."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    [source] = named_sources(folder, {"text": "text"})
    found = divided(opened(source, held_out=0.1, window=4).parts, 0.1)["train"]

    def make(row):
        time.sleep(0.1)
        with open(f"{folder}/../made", "a") as file:
            file.write(f"{os.environ['RANK']} {row['text']}\n")
        return np.frombuffer(row["text"].encode(), np.uint8).astype(np.int32)

    made = ragged(found, make, made_by="slow", what="making")
    dist.barrier()
    dist.destroy_process_group()
    return int(made.values.sum()) + len(made.ends)


@pytest.mark.slow
def test_one_process_prepares_while_the_others_wait_at_a_lock(tmp_path):
    write(tmp_path / "data", "parquet", rows(180))
    one, other = run(prepared, str(tmp_path / "data"), ranks=2).ok()
    assert one == other > 0
    lines = [line.split(" ", 1) for line in (tmp_path / "made").read_text().splitlines()]
    assert (
        len({rank for rank, _ in lines}) == 1
        and len({text for _, text in lines}) == len(lines) > 100
    )


class Counted:
    """Rows of numbers."""

    def __len__(self) -> int:
        return 4700

    def __getitem__(self, index: int) -> dict:
        return {"number": index}

    def fingerprint(self) -> str:
        return "counted"


def made_often(times: int) -> int:
    """As in a run, which only records signals: forked processes would inherit that, and not end at
    a signal."""
    import signal

    def make(row):
        return np.full(1, row["number"], np.int32)

    signal.signal(signal.SIGTERM, lambda *_: None)
    made = [ragged(Counted(), make, made_by=time, what="making").values for time in range(times)]
    return sum(int((values == np.arange(4700)).all()) for values in made)


class Few(list):
    """Numbers as rows."""

    def __init__(self) -> None:
        super().__init__({"number": number} for number in range(40))

    def fingerprint(self) -> str:
        return "few"

    def where(self, index: int) -> str:
        return f"row {index}"


def made_of_few():
    """Return the arrays of these rows, with their lengths, and the rows that they skip."""

    def make(row):
        if row["number"] == 7:
            raise ValueError("seven")
        return np.full(1 + row["number"] % 3, row["number"], np.int32)

    made = ragged(Few(), make, made_by=1, what="making", skip=True)
    return made.values.tolist(), made.ends.tolist(), [tuple(row) for row in made.skipped]


DAMAGE = {
    "missing": Path.unlink,
    "half": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_half_of_a_cached_set_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path))
    right = made_of_few()
    assert len(right[0]) == 77 and len(right[1]) == 39 and right[2] == [(7, "seven")]
    (folder,) = [path for path in (tmp_path / "made").iterdir() if path.is_dir()]
    for name in ("values.bin", "ends.npy", "rows.json"):
        DAMAGE[damage](folder / name)
        assert made_of_few() == right
        assert (folder / name).is_file()

    # A file in place of the folder.
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    assert made_of_few() == right and len([*(tmp_path / "made").glob("bad-*")]) == 1


@pytest.mark.parametrize("damage", ["missing", "empty", "a folder"])
def test_half_of_a_converted_file_is_made_again(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.csv").write_text("x,y\na,1\nb,2\n")

    def contents():
        table = table_of(found_files(str(tmp_path / "rows.csv"), ["csv"]), "", ["x", "y"])
        return [table[index] for index in range(len(table))]

    right = contents()
    assert right == [{"x": "a", "y": "1"}, {"x": "b", "y": "2"}]
    there = [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"]
    files = [path for path in there if path.is_file()]
    assert {file.suffix for file in files} == {".arrow", ".json"} and len(files) == 3
    for file in files:
        DAMAGE[damage](file)
        assert contents() == right, file
        assert file.is_file()


def test_a_full_disk_names_the_cache_and_its_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.csv").write_text("x,y\na,1\nb,2\n")
    csv = found_files(str(tmp_path / "rows.csv"), ["csv"])
    fillers = {
        "made/": (made_of_few, 100),
        "checksums/": (lambda: table_of(csv, "", ["x"]), 0),
        "tables/": (lambda: table_of(csv, "", ["x"]), 300),
        "bpe/": (lambda: ending_tokenizer(["text"], 300, cache_key="text"), 300),
    }
    for name, (fill, size) in fillers.items():
        with pytest.raises(BadInput) as caught, full_disk(size):
            fill()
        assert f"{tmp_path}/cache/{name}" in str(caught.value)
        assert "File too large" in str(caught.value)
        assert "; make room, or set ONELOOP_CACHE to another folder" in str(caught.value)
    assert not [*(tmp_path / "cache").rglob("*draft*")]


@pytest.mark.parametrize("times", [10, pytest.param(25, marks=pytest.mark.slow)])
def test_processes_that_prepare_rows_always_end(times):
    assert run(made_often, times, timeout=120).ok() == [times]


def test_tokens_of_rows_are_those_of_the_same_texts_in_memory(tmp_path):
    from oneloop.tasks.causal_lm import CausalLM

    made = rows(200)
    write(tmp_path / "rows", "parquet", made)
    for pack in ("concat", "padded"):
        task = CausalLM(str(tmp_path / "rows"), block=16, pack=pack)
        tokens = {
            name: [part[i].documents[0].tolist() for i in range(len(part))]
            for name, part in task._sets.items()
        }
        texts = opened_texts(tmp_path / "rows")
        for name, expected in texts.items():
            streams = [[*text.encode(), 256] for text in expected]
            streams = (
                [[token for text in streams for token in text]] if pack == "concat" else streams
            )
            cut = [s[at : at + 17] for s in streams for at in range(0, len(s) - 1, 16)]
            cut = (
                [one for one in cut if len(one) == 17]
                if pack == "concat" and name == "train"
                else cut
            )
            assert tokens[name] == cut


def opened_texts(folder: Path) -> dict[str, list[str]]:
    [source] = named_sources(str(folder), {"column": "text"})
    parts = opened(source, held_out=0.05, window=4).parts
    return {part: [found[i]["text"] for i in range(len(found))] for part, found in parts.items()}
