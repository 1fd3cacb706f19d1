"""Rows of CSV and JSON Lines: what Python's modules read, or an error with file and line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from oneloop.tasks.rows.csv_json_lines import FileRow, file_rows
from oneloop.tasks.rows.open_data import Source, named_sources, opened, whole
from oneloop.tasks.rows.rows import divided
from oneloop.tasks.text_classification import TextClassification

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.arrow_tables",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.rows.column_types",
    "oneloop.tasks.rows.csv_json_lines",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.rows.parquet_files",
    "oneloop.tasks.rows.rows",
    "oneloop.tasks.text_classification",
)

SMALL: dict[str, Any] = {"model": "bytes", "layers": 1, "heads": 2, "width": 16, "length": 64}
LABELLED = [{"text": f"movie {n}", "label": "pos" if n % 2 else "neg"} for n in range(60)]


def write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def lines(rows: list[Any]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def read(file: Path, kind: str = "csv") -> list[FileRow]:
    return list(file_rows(file, kind))


# --- CSV ---


@pytest.mark.parametrize(
    "text",
    [
        "a,b\nx,y\n",
        "a,b\r\nx,y\r\n",
        "a,b\nx,y",
        '\ufeffa,b\n"x",y\n',
        'a,b\n"x, y","l 1\nl 2"\n',
        'a,b\n"say ""hi""",\n',
        'a,b\nhe "said" it,5" pipe\n',
        "a,b\n  x , y  \n\n\nu,v\n",
        "a,b\nx\u2028y,u\x0bv\n",
        "a;b,c\nx;y,z\n",
    ],
)
def test_csv_is_read_as_by_python(tmp_path, text):
    file = write(tmp_path / "a.csv", text)
    expected = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    assert [row.values for row in read(file)] == expected


@pytest.mark.parametrize(
    ("bad", "line", "why"),
    [
        ('"he said \\"good\\"",pos', 3, "characters after a closing quote"),
        ('"he said" loudly,pos', 3, "characters after a closing quote"),
        ('"a" "b",pos', 3, "characters after a closing quote"),
        ('"a"b,pos', 3, "characters after a closing quote"),
        ("one,two,three", 3, "3 values, and the first line names 2 columns"),
        ("one", 3, "1 values, and the first line names 2 columns"),
        (b"x\xe9,pos", 3, "'text' is not valid Unicode text"),
    ],
)
def test_a_bad_row_of_csv_is_named_or_skipped(tmp_path, monkeypatch, bad, line, why):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    bad = bad.encode() if isinstance(bad, str) else bad
    rest = "".join(f"t {n},{'ab'[n % 2]}\n" for n in range(40)).encode()
    file = write(tmp_path / "a.csv", b"text,label\nfirst,a\n" + bad + b"\n" + rest)
    with pytest.raises(ValueError, match=rf"a\.csv, line {line}: {why}.*task\.unreadable skip"):
        TextClassification(str(file), **SMALL)

    # The other rows are read, and keep their numbers in the file.
    task = TextClassification(str(file), unreadable="skip", **SMALL)
    sets = [task.train_set(), *task.eval_sets().values()]
    texts = {
        data.where(n): task.reader.decode(data[n][0]) for data in sets for n in range(len(data))
    }
    expected = {f"{file}, row {n + 2}": f"t {n}" for n in range(40)}
    assert texts == expected | {f"{file}, row 0": "first"}
    assert len(task.skipped_rows) == 1 and f"line {line}" in task.skipped_rows[0]
    assert "1 rows were skipped" in " ".join(task.notes)


@pytest.mark.parametrize("bad", ['"never closed,x', '"He said "hi" and\nleft",x', '"a"b",x'])
def test_a_row_whose_end_is_unknown_cannot_be_skipped(tmp_path, monkeypatch, bad):
    """Its tail must not become a row, and the rows after it must not disappear."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    rest = "".join(f"t {n},{'ab'[n % 2]}\n" for n in range(40))
    file = write(tmp_path / "a.csv", f"text,label\nfirst,a\n{bad}\n{rest}")
    with pytest.raises(ValueError, match=r"line 3: .*the end of this row is unknown"):
        TextClassification(str(file), unreadable="skip", **SMALL)


def test_an_open_quote_in_the_last_line_is_one_row(tmp_path):
    rows = read(write(tmp_path / "a.csv", 'text,label\na,b\n"c,d'))
    assert [row.values for row in rows] == [{"text": "a", "label": "b"}, {}]
    assert rows[1].line == 3 and "not closed" in rows[1].bad[None]


def test_a_list_that_is_cut_is_no_single_row(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "d" / "a.json", json.dumps(LABELLED))
    write(tmp_path / "d" / "b.json", json.dumps(LABELLED)[:-5])
    with pytest.raises(ValueError, match=r"b\.json, line 1: not JSON"):
        TextClassification(str(tmp_path / "d"), unreadable="skip", **SMALL)


def test_no_row_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    file = write(tmp_path / "a.csv", b"text,label\n" + b"\xe9,a\n" * 9)
    with pytest.raises(ValueError, match=r"no row can be read, the first: .*line 2"):
        TextClassification(str(file), unreadable="skip", **SMALL)


def test_values_on_the_border_of_two_reads(tmp_path):
    """Multi-byte characters, quotes and line ends at every offset around the buffer's border."""
    border = 1 << 20
    for shift in range(8):
        first = "x" * (border - 12 - shift)
        text = f'a,b\r\n{first},é\r\n"ü ""q""\r\nn",€\r\n'
        expected = list(csv.DictReader(io.StringIO(text, newline="")))
        assert [row.values for row in read(write(tmp_path / "a.csv", text))] == expected


@pytest.mark.parametrize("ending", ["gz", "bz2", "zst"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_compressed_files_are_the_same_rows(tmp_path, monkeypatch, ending, kind):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    text = lines(LABELLED)
    if kind == "csv":
        text = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in LABELLED)
    packed = {"gz": gzip.compress, "bz2": bz2.compress}.get(
        ending, lambda data: pa.compress(data, codec="zstd", asbytes=True)
    )
    plain = write(tmp_path / "plain" / f"train.{kind}", text)
    other = write(tmp_path / "packed" / f"train.{kind}.{ending}", packed(text.encode()))

    def samples(file: Path) -> list[Any]:
        task = TextClassification(str(file.parent), **SMALL)
        data = task.train_set()
        return [
            (list(data[n][0]["input_ids"]), data[n][1], data.where(n).rpartition(", ")[2])
            for n in range(len(data))
        ]

    assert samples(other) == samples(plain)

    # A file that is cut is named.
    other.write_bytes(other.read_bytes()[:-20])
    with pytest.raises(ValueError, match=rf"train\.{kind}\.{ending}"):
        samples(other)


def test_a_file_that_is_there_twice_is_named(tmp_path):
    write(tmp_path / "train.jsonl", lines(LABELLED))
    write(tmp_path / "train.jsonl.gz", gzip.compress(lines(LABELLED).encode()))
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz is there twice"):
        TextClassification(str(tmp_path), **SMALL)


# --- JSON ---


@pytest.mark.parametrize("column", ["text", "label"])
def test_half_a_character_is_named_or_skipped(tmp_path, monkeypatch, column):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    bad = {**LABELLED[0], column: "cut \ud83d"}
    file = write(tmp_path / "train.jsonl", lines([*LABELLED[:39], bad, *LABELLED[39:]]))
    with pytest.raises(
        ValueError, match=rf"train\.jsonl, line 40: '{column}' is not valid Unicode"
    ):
        TextClassification(str(file), **SMALL)
    task = TextClassification(str(file), unreadable="skip", **SMALL)
    assert sum(map(len, (task.train_set(), *task.eval_sets().values()))) == len(LABELLED)


ODD = {
    "numbers and texts": lambda n: n if n % 2 else f"a{n}",
    "lists and numbers": lambda n: [n] if n % 2 else n,
    "more than 64 bits": lambda n: 2**64 + n,
    "truth and texts": lambda n: True if n % 2 else "no",
    "half a character": lambda n: "\ud83d",
    "objects and numbers": lambda n: {"a": n} if n % 2 else n,
    "a type that changes late": lambda n: n if n < 55 else "late",
    "integers that are no floats": lambda n: 2**53 + 1 + n if n < 55 else 0.5,
    "deep lists": lambda n: json.loads("[" * 100 + "]" * 100),
}


@pytest.mark.parametrize("name", ODD)
def test_a_column_that_no_task_reads_cannot_stop_a_run(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("oneloop.tasks.rows.text_tables._ROWS", 50)
    rows = [{**row, "odd": ODD[name](n)} for n, row in enumerate(LABELLED)]
    file = write(tmp_path / "train.jsonl", lines(rows))
    task = TextClassification(str(file), **SMALL)
    assert task.classes == ["neg", "pos"]
    with pytest.raises(ValueError, match=r"'odd'"):
        TextClassification(str(file), text="odd", **SMALL)


ROWS = {"data": LABELLED[:5]}
COLUMNS = {"text": {"0": "a"}, "label": {"0": "b"}}
FORMS = {
    "UTF-16": ("a.csv", "text,label\na,b\n".encode("utf-16"), r"a\.csv is UTF-16 text"),
    "UTF-16 without a mark": ("a.jsonl", '{"text": "a"}'.encode("utf-16-le"), "is UTF-16 text"),
    "one object": ("a.json", json.dumps(ROWS, indent=1).encode(), "write one object per line"),
    "one object on a line": ("a.json", json.dumps(ROWS).encode(), "rows seem to be under 'data'"),
    "columns": ("a.json", json.dumps(COLUMNS).encode(), "columns seem to be text, label"),
    "a line for spreadsheets": ("a.csv", b"sep=,\ntext,label\na,b\n", "begins with 'sep=,?'"),
    "an unknown compression": ("a.csv.xz", b"", "is compressed, which is not supported"),
    "deep lists": ("a.jsonl", b"[" * 100_000, "not JSON"),
}


@pytest.mark.parametrize("name", FORMS)
def test_other_forms_of_files_are_recognized(tmp_path, monkeypatch, name):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    file, content, expected = FORMS[name]
    write(tmp_path / "data" / file, content)
    with pytest.raises(ValueError, match=expected):
        TextClassification(str(tmp_path / "data"), **SMALL)


# --- TSV ---


def tsv(rows: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), dialect=csv.excel_tab)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def texts(place: Path, split: str = "all") -> tuple[list[str], str]:
    """Return the texts of a split, and the line about quotes."""
    [source] = named_sources(str(place), {"text": "text"})
    if split == "all":
        whole(source, window=4)
    else:
        opened(source, held_out=0.2, window=4)
    rows = source.parts[split]
    notes = [note.removeprefix(f"{place}: ") for note in source.notes if "fields" in note]
    return [rows[index]["text"] for index in range(len(rows))], " ".join(notes)


@pytest.mark.parametrize(
    "odd", ['he said "hi"', "a\tb", "two\nlines", "two\r\nlines", '"first" word', '"', '5" pipe']
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_tsv_of_a_csv_writer_is_read_with_quotes(tmp_path, odd, pack):
    written = [{"text": text, "label": "x"} for text in (odd, "plain", "", f"{odd} twice")]
    name = "a.tsv" if pack is bytes else "a.tsv.gz"
    file = write(tmp_path / name, pack(tsv(written).encode()))
    read, line = texts(file)
    assert read == [row["text"] for row in written]
    assert line.startswith("fields are read with quotes, as a csv writer makes them: '")
    assert line.endswith(f"in {name}")


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (['"Oh, he said', "plain"], True),
        (['he said "hi"', '"hi" he said'], True),
        (['"hello"', "plain"], True),
        (['"said ""hi"""', '"hello"'], True),
        (['"said ""hi"""', '5" pipe'], True),
        (['"said ""hi"""', '""'], True),
        (['he said "hi"', '5" pipe'], False),
        (["no quotes", "here"], False),
    ],
)
def test_other_tsv_keeps_its_quotes(tmp_path, rows, line):
    file = write(tmp_path / "a.tsv", "text\n" + "\n".join(rows) + "\n")
    read, about = texts(file)
    assert read == rows
    assert about.startswith("fields keep their quotes; a csv writer would not make '") == line
    assert bool(about) == line


@pytest.mark.parametrize(
    "rows",
    [
        ['"I love it.\tx', 'It is great."\tx'],
        ['"I love it.\tx', "Really.\tx", 'It is great."\tx'],
        ['"How do I\tgo home?"', "plain\tx"],
    ],
)
def test_a_quotation_over_several_rows_or_fields_is_no_field(tmp_path, rows):
    """Each line is a row without quotes, as in GLUE's sentences."""
    file = write(tmp_path / "a.tsv", "text\tlabel\n" + "\n".join(rows) + "\n")
    assert texts(file)[0] == [row.split("\t")[0] for row in rows]


@pytest.mark.parametrize("odd", ['he "hi"\tx\ny', "a\tb\nc"])
def test_a_field_of_a_csv_writer_may_hold_lines_like_rows(tmp_path, odd):
    """Doubled quotes, or another field, show that a csv writer made the file."""
    rows = [{"text": text, "label": "x"} for text in (odd, "two\nlines", "plain")]
    file = write(tmp_path / "a.tsv", tsv(rows))
    assert texts(file)[0] == [row["text"] for row in rows]


def test_all_tsv_files_of_a_data_set_have_one_rule(tmp_path):
    quoted = tsv([{"text": f'said "{n}"', "label": "x"} for n in range(9)])
    write(tmp_path / "train.tsv", quoted)
    write(tmp_path / "dev.tsv", "text\tlabel\nplain\tx\n")
    assert texts(tmp_path, "train")[0] == [f'said "{n}"' for n in range(9)]
    write(tmp_path / "test.tsv", 'text\tlabel\n"a" b\tx\n')
    read, line = texts(tmp_path, "train")
    assert read == [f'"said ""{n}"""' for n in range(9)]
    assert line.endswith("a csv writer would not make '\"a\" b\\tx' in test.tsv")
    assert texts(tmp_path, "test")[0] == ['"a" b']


# --- types of columns ---


BIG = 2**63


@pytest.mark.parametrize(
    ("labels", "misfit"),
    [
        ([1, "1"], '"1" in line 2 of a.jsonl does not fit the type int64 of others'),
        (["1", 1], "1 in line 2 of a.jsonl does not fit the type string of others"),
        ([1] * 2500 + [[2]], "[2] in line 2501 of a.jsonl does not fit the type int64"),
        ([1, True], "true in line 2 of a.jsonl does not fit the type int64"),
        ([[1], ["x"]], '["x"] in line 2 of a.jsonl does not fit the type list<item: int64>'),
        ([1, 2 * BIG], f"{2 * BIG} in line 2 of a.jsonl does not fit the type int64"),
        ([BIG, 3, -1, 4], "-1 in line 3 of a.jsonl does not fit the type uint64"),
        ([BIG, 1.5], "1.5 in line 2 of a.jsonl does not fit the type uint64 of others"),
        ([0.5] * 1200 + [2**53 + 1], f"{2**53 + 1} in line 1201 of a.jsonl does not fit"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path, labels, misfit):
    file = write(tmp_path / "a.jsonl", lines([{"text": "t", "label": one} for one in labels]))
    [source] = named_sources(str(file), {"text": "text", "label": "label"})
    message = f"must hold values of one type: {misfit}"
    with pytest.raises(ValueError, match=re.escape(message) + ".*; write one type, such as text"):
        whole(source, window=4)
    [source] = named_sources(str(file), {"text": "text"})
    assert len(whole(source, window=4).parts["all"]) == len(labels)


def test_whole_numbers_of_64_bits_are_classes(tmp_path):
    rows = [{"text": f"t {n}", "label": BIG * (n % 2) + n % 3} for n in range(60)]
    task = TextClassification(str(write(tmp_path / "a.jsonl", lines(rows)).parent), **SMALL)
    expected = sorted({row["label"] for row in rows})
    assert task.classes == [*map(str, expected)] and max(expected) > BIG


VIEWS = [
    ("text", pa.string_view(), [f"text {n}" for n in range(50)]),
    ("text", pa.string_view(), ["same text"] * 49 + ["other"]),
    ("lists", pa.list_(pa.string_view()), [["a", f"b{n}"] for n in range(50)]),
    ("lists", pa.large_list(pa.string_view()), [["a"]] * 50),
    ("objects", pa.list_(pa.struct([("role", pa.string_view())])), [[{"role": "user"}]] * 50),
]


@pytest.mark.parametrize(
    ("ending", "column", "kind", "values"),
    # pyarrow cannot write objects with views as Parquet.
    [("arrow", *view) for view in VIEWS] + [("parquet", *view) for view in VIEWS[:-1]],
)
def test_views_of_texts_are_texts(tmp_path, ending, column, kind, values):
    table = pa.table({column: pa.array(values, kind)})
    file = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, file, row_group_size=20)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    [source] = named_sources(str(file), {"x": column})
    rows = whole(source, window=4).parts["all"]
    assert "view" not in str(rows.types) and "string" in str(rows.types[column])
    assert [rows[index][column] for index in range(50)] == values
    chosen = np.arange(0, 50, 3)
    for some, expected in ((rows, values), (rows.select(chosen), values[::3])):
        read = [*some.values(column)]
        assert not any("view" in str(array.type) for array in read)
        assert [value for array in read for value in array.to_pylist()] == expected


@pytest.mark.parametrize("place", ["text", "lists"])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_texts_that_are_not_utf8_are_named_or_skipped(tmp_path, place, ending):
    values = [b"\xff\xfeab" if n in (7, 31) else b"ok%d" % n for n in range(40)]
    stored = pa.array(values, pa.binary())
    column = pa.Array.from_buffers(pa.string(), 40, stored.buffers())
    if place == "lists":
        column = pa.ListArray.from_arrays(pa.array(range(41), pa.int32()), column)
    table = pa.table({place: column, "id": range(40)})
    file = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table, file, row_group_size=10)
    else:
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    columns = {"x": place, "id": "id"}
    [source] = named_sources(str(file), columns)
    with pytest.raises(ValueError, match=rf"2 rows .*a\.{ending}, row 7: '{place}' is not valid"):
        opened(source, held_out=0.2, window=4)
    [source] = named_sources(str(file), columns, unreadable="skip")
    parts = opened(source, held_out=0.2, window=4).parts.values()
    read = {rows[at]["id"]: rows.where(at) for rows in parts for at in range(len(rows))}
    assert sorted(read) == sorted({*range(40)} - {7, 31})
    assert all(where.endswith(f"row {number}") for number, where in read.items())
    assert [row.partition(", ")[2][:6] for row in source.skipped or ()] == ["row 7:", "row 31"]


# --- numbers of rows ---


@pytest.mark.parametrize("bad", [[], [0], [0, 1], [59], [0, 59], [0, 30]])
@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_numbers_of_rows_are_those_of_their_files(tmp_path, bad, ending):
    for name, first in (("a", 0), ("b", 100)):
        if ending == "csv":
            read = [f"t{first + n},x\n" for n in range(60)]
            content = ["text,label\n", *('"a"b,x\n' if n in bad else read[n] for n in range(60))]
        else:
            read = [f'{{"text": "t{first + n}"}}\n' for n in range(60)]
            content = ["{broken\n" if n in bad else read[n] for n in range(60)]
        write(tmp_path / f"{name}.{ending}", "".join(content))
    [source] = named_sources(str(tmp_path), {"text": "text"}, unreadable="skip")
    parts = [*opened(source, held_out=0.1, window=4).parts.values()]
    parts.append(whole(source, window=4).parts["all"])
    every = parts[-1]
    parts += [every.select(np.arange(10, 20)), every.select(np.arange(5, len(every)))]
    parts.append(parts[-1].select(np.arange(3, 80)).select(np.array([0, 1, 40])))
    for rows in parts:
        for index in range(len(rows)):
            number = int(rows[index]["text"][1:])
            where = f"{'ab'[number // 100]}.{ending}, row {number % 100}"
            assert rows.where(index) == str(tmp_path / where)


# --- splits ---


def test_a_rare_class_stays_in_train(tmp_path, monkeypatch):
    """Its only row would be drawn for validation or test; all other draws stay the same."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    kept = 0
    for draw in range(20):
        rows = [dict(row) for row in LABELLED]
        rows[7] = {"text": f"rare {draw}", "label": "rare"}
        file = write(tmp_path / f"{draw}.jsonl", lines(rows))
        [source] = named_sources(str(file), {"text": "text", "label": "label"})
        parts = opened(source, held_out=0.1, window=4, label="label").parts
        [plain] = named_sources(str(file), {"text": "text", "label": "label"})
        before = opened(plain, held_out=0.1, window=4).parts

        def texts(part: Any) -> set[str]:
            return {part[n]["text"] for n in range(len(part))}

        rare = {f"rare {draw}"}
        assert rare <= texts(parts["train"])
        for split in ("validation", "test"):
            assert texts(parts[split]) == texts(before[split]) - rare
        if not rare <= texts(before["train"]):
            kept += 1
            assert "1 rows stay in train" in source.notes[-1] and "rare (1)" in source.notes[-1]
        else:
            assert len(source.notes) == 1 and "rows are distinct" in source.notes[0]
    assert 1 <= kept <= 7


def test_soft_labels_and_mixtures_keep_their_splits(tmp_path, monkeypatch):
    """Probabilities are no classes, and another source of a mixture may train a class."""
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    table = pa.table(
        {"text": [f"t {n}" for n in range(90)], "label": [[n / 90, 1 - n / 90] for n in range(90)]}
    )
    for number, kind in enumerate((pa.list_(pa.float64()), pa.list_(pa.float64(), 2))):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        pq.write_table(
            table.set_column(1, "label", table["label"].cast(kind)), folder / "a.parquet"
        )
        lengths = []
        for label in ("label", ""):
            [source] = named_sources(str(folder), {"text": "text", "label": "label"})
            parts = opened(source, held_out=0.1, window=4, label=label).parts
            lengths.append([len(part) for part in parts.values()])
            assert len(source.notes) == 1 and "rows are distinct" in source.notes[0]
        assert lengths[0] == lengths[1]

    for name, labels in (("one", ["rare", *["a", "b"] * 20]), ("two", ["rare", "a", "b"] * 14)):
        rows = [{"text": f"{name} {n}", "label": label} for n, label in enumerate(labels)]
        write(tmp_path / name / "train.jsonl", lines(rows))
    data = [{"data": str(tmp_path / "one")}, {"data": str(tmp_path / "two")}]
    task = TextClassification(data, **SMALL)
    assert not any("stay in train" in note for note in task.notes)


def test_a_column_that_some_files_lack_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "d" / "train.jsonl", lines([{**row, "second": "x"} for row in LABELLED]))
    write(tmp_path / "d" / "validation.jsonl", lines(LABELLED[:9]))
    with pytest.raises(ValueError, match=r"only some files have the column 'second'"):
        TextClassification(str(tmp_path / "d"), second="second", **SMALL)


def test_splits_need_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    [source] = named_sources(
        str(write(tmp_path / "a.jsonl", lines(LABELLED[:2]))), {"text": "text"}
    )
    with pytest.raises(ValueError, match="2 rows are too few"):
        opened(source, held_out=0.1, window=4)
    assert divided({"train": [1], "validation": [2]}, 0.1) == {"train": [1], "validation": [2]}


def test_rows_of_arrow_shards_are_those_of_their_files(tmp_path):
    """Datasets of the hub, and of ``save_to_disk``."""
    rows = [{"text": f"t{n}", "label": n} for n in range(40)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "a", num_shards=2)
    made = whole(Source(str(tmp_path / "a"), {"text": "text"}), window=16).parts["all"]
    for index, (shard, row) in ((19, (0, 19)), (25, (1, 5))):
        assert made.where(index) == f"{tmp_path}/a/data-0000{shard}-of-00002.arrow, row {row}"


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_column_that_some_parquet_files_lack_is_named(tmp_path, lacking):
    """An optional column would be left out of all files, and nothing would say so."""
    for number in range(2):
        table = pa.table({"text": ["a", "b"], "second": ["x", "y"]})
        if number == lacking:
            table = table.drop_columns(["second"])
        pq.write_table(table, tmp_path / f"{number}.parquet")
    [source] = named_sources(str(tmp_path), {"text": "text", "second": "second"})
    expected = rf"only some files have the column 'second': .*{lacking}.parquet has no column"
    with pytest.raises(ValueError, match=expected):
        whole(source, window=4)


def test_arrow_files_for_random_access_are_read(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    table = pa.table({"text": [f"t{n}" for n in range(2500)]})
    file = str(tmp_path / "a.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    [source] = named_sources(file, {"text": "text"})
    rows = whole(source, window=4).parts["all"]
    assert [rows[index]["text"] for index in range(len(rows))] == table["text"].to_pylist()

    # Neither format of Arrow.
    (tmp_path / "a.arrow").write_bytes(b"no Arrow file")
    [source] = named_sources(file, {"text": "text"})
    with pytest.raises(ValueError, match=r"a\.arrow cannot be read as Arrow"):
        whole(source, window=4)
