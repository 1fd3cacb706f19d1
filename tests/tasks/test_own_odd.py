"""Odd but plausible user files are read correctly or rejected with a message; they are never
silently misread."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from oneloop.tasks.causal_lm import CausalLM
from oneloop.tasks.rows.find_files import KINDS_OF_ROWS, found
from oneloop.tasks.rows.images import decoded
from oneloop.tasks.rows.mixture import Mixture
from oneloop.tasks.rows.open_data import named_sources, opened
from oneloop.tasks.rows.parquet import Parquet
from oneloop.tasks.rows.parquet_files import LocalFile
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_regression import TextRegression
from oneloop.tasks.token_classification import TokenClassification
from own_files import WORDS, again, rows, started, write

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.mixture",
    "oneloop.tasks.causal_lm",
    "oneloop.tasks.columns",
    "oneloop.tasks.rows.csv_json_lines",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.images",
    "oneloop.tasks.rows.open_data",
    "oneloop.tasks.rows.parquet",
    "oneloop.tasks.rows.parquet_files",
    "oneloop.tasks.rows.rows",
    "oneloop.tasks.text_classification",
    "oneloop.tasks.text_regression",
    "oneloop.tasks.token_classification",
)

LINE = '{"text": "a", "label": "b"}\n'
SMALL = {"layers": 1, "heads": 2, "width": 16}


def lay(folder: Path, *names: str, text: str = LINE) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def texts(place: Path, column: str = "text", **options) -> dict[str, list]:
    [source] = named_sources(str(place), {"text": column, "label": "label"})
    parts = opened(source, held_out=0.2, window=4).parts
    return {part: [found[i] for i in range(len(found))] for part, found in parts.items()}


# --- which files, and splits ---


@pytest.mark.parametrize(
    "names",
    [
        (
            "data/train-00000-of-00001.jsonl",
            "data/validation-00000-of-00001.jsonl",
            "data/test-00000-of-00001.jsonl",
        ),
        ("a/train.jsonl", "a/dev.jsonl", "a/test.jsonl"),
        ("deep/down/train/x.jsonl", "deep/down/valid/x.jsonl", "deep/down/test/x.jsonl"),
        ("reviews_train.jsonl", "reviews_val.jsonl", "reviews_test.jsonl"),
        # Digits, a capital, and set, data, file or split after the word separate words.
        ("train1.jsonl", "dev1.jsonl", "test1.jsonl"),
        ("train2020/a.jsonl", "valid2020/a.jsonl", "test2020/a.jsonl"),
        ("myTrainData.csv", "myDevData.csv", "myTestData.csv"),
        ("trainset.jsonl.gz", "devset.jsonl.gz", "testdata.jsonl.gz"),
        ("TRAINSET.jsonl", "VALIDATION_DATA.jsonl", "TEST_2.jsonl"),
        ("training_set/a.jsonl", "ValidFile/a.jsonl", "testsplit/a.jsonl"),
        ("train1/a.txt", "devset/a.txt", "TestData/a.txt"),
        ("TrainData/cat/x.png", "valid_1/cat/x.png", "testset/cat/x.png"),
        # A folder with several names, or one that holds all files, does not decide.
        ("train_test_split/train.tsv", "train_test_split/dev.tsv", "train_test_split/test.tsv"),
        ("my_test_project/train.tsv", "my_test_project/dev.tsv", "my_test_project/test.tsv"),
    ],
)
def test_parts_are_found_wherever_their_names_stand(tmp_path, names):
    lay(tmp_path, *names)
    parts = found(tmp_path, [*KINDS_OF_ROWS, "text"]).parts
    assert {
        part: [file.relative_to(tmp_path).as_posix() for file in files]
        for part, files in parts.items()
    } == {part: [name] for part, name in zip(("train", "validation", "test"), names, strict=True)}


@pytest.mark.parametrize(
    "names",
    [
        ("data.jsonl", "test.jsonl"),
        ("fold1/a.jsonl", "test/a.jsonl"),
        ("pretraining/a.jsonl", "validation/a.jsonl"),
        ("trainset.jsonl", "valset.jsonl"),
        ("test.jsonl",),
    ],
)
def test_parts_of_which_only_some_are_named_are_rejected(tmp_path, names):
    with pytest.raises(ValueError, match="name the training data train"):
        found(lay(tmp_path, *names))


@pytest.mark.parametrize(
    "names",
    [
        ("latest.jsonl",),
        ("contest.csv", "devices.csv"),
        ("pretrain/a.jsonl", "pretrain/latest.jsonl"),
        ("mytrain.jsonl", "others.jsonl"),
        ("train_test_split.csv",),
        ("testdatabase.jsonl", "devsettings.jsonl"),
        ("train_test_1.csv", "train_test_2.csv"),
    ],
)
def test_nothing_else_is_split_inside_a_word(tmp_path, names):
    made = found(lay(tmp_path, *names))
    assert set(made.parts) == {""} and len(made.files) == len(names)
    assert not made.notes


@pytest.mark.parametrize(
    ("names", "both"),
    [
        (("mytrain.jsonl", "mytest.jsonl"), "'mytrain.jsonl' contains train, and 'mytest.jsonl'"),
        (("atrain/x.csv", "adev/x.csv"), "'atrain' contains train, and 'adev'"),
        (("mytrain/cat/x.png", "mytest/cat/x.png"), "'mytrain' contains train, and 'mytest'"),
        (("mytrain.txt", "myvalid.txt"), "'mytrain.txt' contains train, and 'myvalid.txt'"),
    ],
)
def test_names_that_seem_to_be_two_splits_are_rejected(tmp_path, names, both):
    folder = lay(tmp_path, *names)
    kinds = [*KINDS_OF_ROWS, "text"]
    with pytest.raises(ValueError, match=rf"{both}.*; rename them train.… and test.…"):
        found(folder, kinds)
    assert len(found(folder, kinds, whole=True).files) == 2


def test_code_and_documents_have_no_splits_by_words(tmp_path):
    code = lay(tmp_path / "code", "train.py", "mytrain.py", "tests/test_a.py", "notes/devices.md")
    assert found(code, ["text"]).notes == [] and len(found(code, ["text"]).parts[""]) == 4
    texts = lay(tmp_path / "texts", "a/mytrain.md", "b/mytest.md")
    assert set(found(texts, ["text"]).parts) == {""}


def test_of_images_a_folder_of_a_class_is_no_part(tmp_path):
    lay(tmp_path / "a", "train/x.png", "car/y.png", "dog/train_1.png")
    assert set(found(tmp_path / "a").parts) == {""}
    lay(tmp_path / "c", "Train1/x.png", "Plane1/y.png", "all/mytest/z.png")
    assert set(found(tmp_path / "c").parts) == {""}
    lay(tmp_path / "d", "rps-test-set/rock/x.png", "rps-test-set/paper/y.png")
    assert set(found(tmp_path / "d").parts) == {""}
    lay(tmp_path / "b", "pets/train/cat/x.png", "pets/test/cat/x.png", "pets/val/cat/y.png")
    assert set(found(tmp_path / "b").parts) == {"train", "validation", "test"}


def test_links_are_followed_and_broken_ones_reported(tmp_path):
    lay(tmp_path / "far", "one.jsonl", "two.jsonl")
    folder = lay(tmp_path / "data", "three.jsonl")
    (folder / "more").symlink_to(tmp_path / "far")
    assert len(found(folder).files) == 3
    (folder / "again").symlink_to(tmp_path / "far")
    with pytest.raises(ValueError, match="has already been read; remove the link"):
        found(folder)
    (folder / "again").unlink()
    (folder / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="gone.jsonl is a broken link"):
        found(folder)


def test_packed_files_are_reported(tmp_path):
    with pytest.raises(ValueError, match="b.jsonl.xz is compressed"):
        found(lay(tmp_path, "a.jsonl", "b.jsonl.xz"))
    assert len(found(lay(tmp_path / "read", "a.jsonl", "b.jsonl.gz")).files) == 2


def test_what_datasets_keeps_beside_a_saved_set_is_not_read(tmp_path):
    from datasets import Dataset, load_from_disk

    Dataset.from_list(rows(30)).save_to_disk(tmp_path / "saved")
    load_from_disk(str(tmp_path / "saved")).map(lambda row: {"text": row["text"] * 2})
    assert len(list((tmp_path / "saved").glob("*.arrow"))) == 2
    assert sum(map(len, texts(tmp_path / "saved").values())) == 30


def test_a_language_model_reads_what_belongs_to_its_data(tmp_path):
    made = "".join(
        json.dumps({"text": f"row {n} {'x' * 40}", "other": "y" * 30 + str(n)}) + "\n"
        for n in range(40)
    )
    folder = lay(tmp_path / "data", "rows.JSONL", text=made)
    lay(folder, "README.md", "LICENSE.txt", ".secret/x.txt", text="SECRET")
    task = CausalLM(str(folder), block=8, **SMALL)
    documents = [document for sample in task.train_set() for document in sample.documents]
    seen = {int(token) for document in documents for token in document}
    assert not {ord(letter) for letter in "SECRET{}"} & seen
    first = CausalLM(str(folder), block=8, tokenizer="bpe", vocab=300, **SMALL)
    other = CausalLM(str(folder), block=8, tokenizer="bpe", vocab=300, column="other", **SMALL)
    assert "y" * 16 in other.tokenizer.get_vocab() and "y" * 16 not in first.tokenizer.get_vocab()


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_a_language_model_holds_out_what_is_asked(tmp_path, kind):
    write(tmp_path / "data", kind, rows(300))

    def held(share: float) -> int:
        return len(
            CausalLM(str(tmp_path / "data"), block=8, held_out=share, **SMALL).eval_sets()[
                "validation"
            ]
        )

    assert 3 * held(0.05) < held(0.3)
    with pytest.raises(ValueError, match="held_out 7"):
        held(7)


# --- csv ---


def test_csv_is_text_as_it_is(tmp_path):
    lines = "".join(f'{n:03d},"{n} said ""yes"",\nand went",0{n % 3}\n' for n in range(60))
    (tmp_path / "a.csv").write_text(f"id,text,label\n{lines}")
    read = {
        row["text"]: row["label"] for part in texts(tmp_path / "a.csv").values() for row in part
    }
    assert read == {f'{n} said "yes",\nand went': f"0{n % 3}" for n in range(60)}
    assert TextClassification(str(tmp_path / "a.csv"), **SMALL).classes == ["00", "01", "02"]
    by_number = {
        row["id"] for part in texts(tmp_path / "a.csv", column="id").values() for row in part
    }
    assert by_number == {f"{n:03d}" for n in range(60)}  # a column of digits is text


def test_quotes_in_tab_separated_files_are_letters(tmp_path):
    quoted = [f'"Oh, he said {n}' if n % 10 == 0 else f"plain {n}" for n in range(100)]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(f"{text}\tx\n" for text in quoted))
    assert sorted(
        row["text"] for part in texts(tmp_path / "a.tsv").values() for row in part
    ) == sorted(quoted)


@pytest.mark.parametrize(
    ("text", "expected_text"),
    [
        (
            "text,label\nreview 0,a,1\nreview 1,b,0\n",
            "3 values, and the first line names 2",
        ),
        ("text,label,label\na,b,c\n", "has two columns 'label'"),
        ("", "a.csv is empty"),
    ],
)
def test_csv_that_does_not_fit_its_first_line_is_rejected(tmp_path, text, expected_text):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=expected_text):
        texts(tmp_path / "a.csv")


def test_an_empty_field_is_no_class(tmp_path):
    lines = [f"text {n},{'' if n == 17 else n % 2}" for n in range(60)]
    (tmp_path / "a.csv").write_text("text,label\n" + "\n".join(lines))
    with pytest.raises(ValueError, match=r"a.csv, row 17 has no value in 'label'"):
        TextClassification(str(tmp_path / "a.csv"), **SMALL)


# --- what is checked over all rows ---


def test_numbers_that_are_none_are_found_before_training(tmp_path):
    for name, wrong in (("nan", float("nan")), ("inf", float("-inf")), ("large", 1e39)):
        made = [{"text": f"t {n}", "label": wrong if n == 20 else 0.5} for n in range(60)]
        parquet.write_table(pa.Table.from_pylist(made), tmp_path / f"{name}.parquet")
        with pytest.raises(
            ValueError,
            match=r"parquet, row 20: -?(nan|inf|1e.39) in 'label' is not a finite number",
        ):
            TextRegression(str(tmp_path / f"{name}.parquet"), **SMALL)
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t {n},{n}.5\n" for n in range(60)))
    assert TextRegression(str(tmp_path / "a.csv"), **SMALL).train_set()[0][1] % 1 == 0.5
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"t {n},{n}.5.1\n" for n in range(60)))
    with pytest.raises(ValueError, match=r"'\d+.5.1' in 'label' is not a finite number"):
        TextRegression(str(tmp_path / "a.csv"), **SMALL)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"tags": ["NAME"]}, "3 words and 1 tags"),
        ({"tokens": [], "tags": []}, "has no value in 'tokens'"),
        ({"tags": ["NAME", "", "O"]}, "has no value in 'tags'"),
        ({"tags": ["NAME", None, "O"]}, "has no value in 'tags'"),
    ],
)
def test_words_and_tags_are_checked_over_all_rows(tmp_path, change, expected_text):
    made = rows(90)
    made[63] |= change
    write(tmp_path / "data", "parquet", made)
    with pytest.raises(ValueError, match=f"part-2.parquet, row 3.*{expected_text}"):
        TokenClassification(str(tmp_path / "data"), **SMALL)


def test_lists_of_a_fixed_length_are_lists(tmp_path):
    table = pa.Table.from_pylist(rows(60))
    for column in ("tokens", "tags"):
        at = table.column_names.index(column)
        table = table.set_column(
            at, column, table[column].combine_chunks().cast(pa.list_(pa.string(), 3))
        )
    (tmp_path / "data").mkdir()
    parquet.write_table(table, tmp_path / "data" / "a.parquet")
    assert TokenClassification(str(tmp_path / "data"), **SMALL).classes == ["COUNT", "NAME", "O"]


def test_labels_that_look_like_numbers(tmp_path):
    made = [{"text": f"t {n}", "label": ["²", "--5", "10", "9"][n % 4]} for n in range(80)]
    (tmp_path / "a.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, made))))
    assert TextClassification(str(tmp_path / "a.jsonl"), **SMALL).classes == ["--5", "10", "9", "²"]


def test_images_of_more_than_sixteen_bits_are_rejected(tmp_path):
    from PIL import Image

    for name, kind in (("b.tiff", np.int32), ("c.tiff", np.float32)):
        Image.fromarray(np.arange(64, dtype=kind).reshape(8, 8)).save(tmp_path / name)
        with pytest.raises(ValueError, match="have more than 16 bits"):
            decoded({"bytes": None, "path": str(tmp_path / name)}, 64)
    with pytest.raises(ValueError, match="the image is missing"):
        decoded({"bytes": None, "path": None}, 64)


# --- parquet ---


def parquet_of(file: Path, columns: list[str], window: int) -> Parquet:
    return Parquet([LocalFile(file, file.parent)], file.parent, columns, window=window, content={})


def test_texts_that_repeat_are_kept_once_in_memory(tmp_path):
    draw = np.random.default_rng(0)
    long = ["".join(map(chr, draw.integers(97, 123, 5000))) for _ in range(400)]
    texts = [long[n // 5 % 400] for n in range(20000)]
    lists = pa.array([[text[:300], text[300:700]] for text in texts])
    table = pa.table({"text": texts, "list": lists, "id": range(20000)})
    # each group has 1,000 texts, of which 200 differ: 5 MB, stored in 1 MB
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    read = parquet_of(tmp_path / "a.parquet", ["text", "list", "id"], 4)
    assert read.reads == 0 and read.open_groups == 3  # by the footers alone

    # Every group fits its bound, and the cached ones fit the limit.
    for index in read.order(seed=0, batch=1)[0:20000][1].tolist():
        row = read[index]
        if index % 100 == 0:
            assert row == {"text": texts[index], "list": lists[index].as_py(), "id": index}
        assert read._held <= 1.25 * 4 * 2**20
    assert read.reads <= 2 * 20
    assert all(read.read(group)[1] <= read._groups[group].size for group in range(20))

    # Whole columns are plain, in pieces.
    pieces = [*read.values("list")]
    assert pa.chunked_array(pieces) == table["list"] and pieces[0].type == lists.type
    assert pa.chunked_array([*read.values("text")]) == table["text"]


def test_a_group_that_is_larger_than_its_footer_says_ends_the_run(tmp_path):
    # DELTA_BYTE_ARRAY stores what each text adds to the one before it.
    texts = ["x" * 5000 + str(n) for n in range(1000)]
    parquet.write_table(
        pa.table({"text": texts}),
        tmp_path / "a.parquet",
        use_dictionary=False,
        column_encoding={"text": "DELTA_BYTE_ARRAY"},
    )
    read = parquet_of(tmp_path / "a.parquet", ["text"], 4)
    with pytest.raises(
        ValueError, match=r"group 0 decompresses to 4.8 MB, although its footer states"
    ):
        read[0]


def test_a_column_with_a_dot_and_one_that_is_not_wanted(tmp_path):
    big = pa.table({"a.b": ["x" * 1000 + str(n) for n in range(3000)]})
    strange = pa.array([[("k", 1)]] * 3000, pa.map_(pa.string(), pa.int64()))
    parquet.write_table(
        big.append_column("strange", strange), tmp_path / "a.parquet", use_dictionary=False
    )
    with pytest.raises(ValueError, match=r"3,000 rows of 2\.\d MB"):
        parquet_of(tmp_path / "a.parquet", ["a.b"], 1)
    assert parquet_of(tmp_path / "a.parquet", ["a.b"], 8)[5]["a.b"].endswith("x5")
    with pytest.raises(ValueError, match="strange is map<.*>, which is not supported"):
        parquet_of(tmp_path / "a.parquet", ["strange"], 8)


# --- what is cached ---


def test_a_file_then_its_folder_then_another_content(tmp_path):
    folder = lay(tmp_path / "data", "train.jsonl", text=LINE.replace("a", "{}") * 3)
    (folder / "train.jsonl").write_text("".join(LINE.replace('"a"', f'"{n}"') for n in range(30)))
    assert sum(map(len, texts(folder / "train.jsonl").values())) == 30
    assert sum(map(len, texts(folder).values())) == 30
    before = (folder / "train.jsonl").stat()
    (folder / "train.jsonl").write_text("".join(LINE.replace('"a"', f'"{n}"') for n in range(40)))
    os.utime(folder / "train.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sum(map(len, texts(folder).values())) == 40


def test_a_damaged_cache_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "data", "jsonl", rows(90))
    whole = texts(tmp_path / "data")
    kept = [file for file in (tmp_path / "cache").rglob("*") if file.suffix in (".arrow", ".json")]
    assert {file.parent.name for file in kept} >= {"tables", "held-out", "unicode", "checksums"}
    for file in kept:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert texts(tmp_path / "data") == whole


def test_rows_of_one_content_are_in_one_part_also_of_few(tmp_path):
    lines = "".join(f'{{"text": "{text}", "label": "x"}}\n' for text in "abbbbbcd")
    (tmp_path / "a.jsonl").write_text(lines)
    parts = {
        part: {row["text"] for row in found} for part, found in texts(tmp_path / "a.jsonl").items()
    }
    assert not parts["train"] & parts["validation"] and not parts["train"] & parts["test"]
    (tmp_path / "a.jsonl").write_text(LINE * 9)
    with pytest.raises(ValueError, match="1 different rows are too few"):
        texts(tmp_path / "a.jsonl")


# --- mixtures ---


def test_a_mixture_in_another_order_is_another(tmp_path):
    for name, first in (("A", 0), ("B", 60)):
        write(tmp_path / name, "parquet", rows(60, first=first))
    words = [
        "digits",
        "--task",
        "text_classification",
        "--task.layers",
        "1",
        "--task.heads",
        "2",
        "--task.width",
        "16",
    ]
    words += [
        "--duration",
        "16",
        "--save.every",
        "8",
        "--batch.size",
        "8",
        "--eval.every",
        "0",
        "--track",
        "none",
    ]

    def mixed(*places: str) -> str:
        return json.dumps(
            [{"data": p, "weight": w} for p, w in zip(places, (0.7, 0.3), strict=True)]
        )

    started(tmp_path, words, mixed("B", "A"))
    world = again(tmp_path, words, mixed("A", "B"))
    assert world.codes == [2] and "order: ['B', 'A'] -> ['A', 'B']" in world.output, world.output
    one = Mixture({"a": WORDS, "b": WORDS}, [1, 2])
    assert one.fingerprint() is None
