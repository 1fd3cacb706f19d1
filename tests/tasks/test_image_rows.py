"""Image files: their endings, their metadata, and their EXIF orientation."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image, ImageOps
from pyarrow import parquet

from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.rows.images import decoded
from oneloop.tools.check.check_data import check_data

pytestmark = pytest.mark.covers(
    "oneloop.data.fingerprint",
    "oneloop.tasks.image_classification",
    "oneloop.tasks.rows.text_tables",
    "oneloop.tasks.rows.find_files",
    "oneloop.tasks.rows.image_rows",
    "oneloop.tasks.rows.images",
    "oneloop.tools.check.check_data",
)

SMALL: dict[str, Any] = {"model": "cnn", "width": 8, "image_size": 16}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def described(folder: Path, rows: list[dict[str, Any]], ending: str = "csv") -> Path:
    """Write 45 images, and a metadata file with these rows."""
    folder.mkdir(parents=True)
    for number in range(45):
        picture(number).save(folder / f"{number:03d}.png")
    file = folder / f"metadata.{ending}"
    if ending == "csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        file.write_text("\n".join(lines) + "\n")
    elif ending == "jsonl":
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), file)
    return folder


def rows_with(labels: list[Any]) -> list[dict[str, Any]]:
    return [
        {"file_name": f"{number:03d}.png", "label": labels[number % len(labels)]}
        for number in range(45)
    ]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["01", "02", "1"], ["01", "1", "02"]),
        (["True", "true", "false"], ["True", "false", "true"]),
        (["1.0", "1.00"], ["1.0", "1.00"]),
        (["2024-01-05", "2024-01-06"], ["2024-01-05", "2024-01-06"]),
        (["NA", "null"], ["NA", "null"]),
        (["3", "10"], ["3", "10"]),
    ],
)
@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_labels_stay_text(tmp_path, labels, classes, ending):
    folder = described(tmp_path / "data", rows_with(labels), ending)
    assert ImageClassification(str(folder), **SMALL).classes == classes


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("000.png", r"names 000\.png twice, with {'label': 'a'} and {'label': 'b'}"),
        ("./000.png", r"names \./000\.png twice"),
        ("sub/../000.png", r"twice"),
        ("999.png", r"names 999\.png, which does not exist"),
        ("", r"has no text in a column 'file_name' of row 45"),
    ],
)
def test_contradictions_are_named(tmp_path, more, expected):
    rows = [*rows_with(["a", "b"]), {"file_name": more, "label": "b"}]
    folder = described(tmp_path / "data", rows)
    with pytest.raises(ValueError, match=expected):
        ImageClassification(str(folder), **SMALL)


def laid(root: Path, *folders: str) -> Path:
    """Write six images into each folder."""
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True)
        for image in range(6):
            picture(100 * number + image).save(root / folder / f"{image}.png")
    return root


def labels_of(task: ImageClassification, folder: Path) -> dict[str, set[str]]:
    """Return the names of the classes of the images, by their folder."""
    samples = task.samples_of(str(folder), labelled=True)
    found: dict[str, set[str]] = {}
    for index in range(len(samples)):
        inside = Path(samples.file(index)).parent.relative_to(folder).as_posix()
        found.setdefault(inside, set()).add(task.classes[samples[index][1]])
    return found


@pytest.mark.parametrize(
    "classes",
    [
        {"a/2019": "a", "a/2020": "a", "b/2019": "b"},
        {"a": "a", "b/deep/down": "b"},
        {"archive/a": "a", "archive/b": "b"},
        {"archive/train/a/x": "a", "archive/train/b": "b", "archive/test/a/y": "a"},
        {"train/archive/a": "a", "train/archive/b": "b", "test/archive/a": "a"},
        {"train/x/a": "a", "train/x/b": "b", "test/a": "a", "test/b": "b"},
        {"train/a": "a", "train/b": "b", "test/x/a": "a", "test/x/b": "b"},
        {"train/train/a": "a", "train/train/b": "b", "test/test/b": "b"},
        {"train/test/x": "test", "train/a": "a", "test/test": "test"},
        {"a/train": "a", "b/train": "b", "a/test": "a"},
    ],
    ids="|".join,
)
def test_the_class_is_the_outermost_folder_that_differs(tmp_path, classes):
    folder = laid(tmp_path / "photos", *classes)
    task = ImageClassification(str(folder), **SMALL)
    assert task.classes == sorted(set(classes.values()))
    each = [*task.train_set(), *(one for part in task.eval_sets().values() for one in part)]
    counts = [6 * [*classes.values()].count(name) for name in task.classes]
    assert [sum(label == number for _, label in each) for number in range(len(counts))] == counts

    # The same of each image in an evaluation, of all images and of those of one class.
    assert labels_of(task, folder) == {inside: {name} for inside, name in classes.items()}
    other = laid(tmp_path / "other", f"{task.classes[0]}/x", f"{task.classes[0]}/y")
    assert set().union(*labels_of(task, other).values()) == {task.classes[0]}
    by_year = {f"{2020 + number}/{name}": name for number, name in enumerate(task.classes)}
    assert labels_of(task, laid(tmp_path / "by_year", *by_year)) == {
        inside: {name} for inside, name in by_year.items()
    }

    # A line names the classes that the innermost folders would give, if they differ.
    [line] = [note for note in task.notes if " classes: " in note]
    differ = any(Path(inside).name != name for inside, name in classes.items())
    assert f"{len(counts)} classes: {task.classes}, from the " in line
    assert ("innermost" in line) == differ

    # Cached results of other classes have another key.
    content = task.train_set().rows.fingerprint()
    assert ("classes" in content) == differ


def test_the_class_of_an_image_in_a_subfolder_is_that_of_torchvision(tmp_path):
    from torchvision.datasets import ImageFolder

    folder = laid(tmp_path / "photos", "a/2019", "a/2020/may", "b", "c/2019")
    task = ImageClassification(str(folder), **SMALL)
    theirs = ImageFolder(str(folder))
    samples = task.samples_of(str(folder), labelled=True)
    ours = {samples.file(index): samples[index][1] for index in range(len(samples))}
    assert task.classes == theirs.classes and ours == dict(theirs.samples)


@pytest.mark.parametrize(
    ("folders", "loose"),
    [
        (["a", "b"], "x.png"),
        (["train/a", "train/b", "test/a"], "train/x.png"),
        (["archive/a", "archive/b/c"], "archive/x.png"),
        (["train/a", "train/b"], "test/x.png"),
    ],
)
def test_images_beside_class_folders_are_rejected_by_name(tmp_path, folders, loose):
    folder = laid(tmp_path / "photos", *folders)
    task = ImageClassification(str(folder), **SMALL)
    (folder / loose).parent.mkdir(exist_ok=True)
    picture(999).save(folder / loose)
    with pytest.raises(ValueError, match=rf"have no class \(1 in all\): {loose}; move each into"):
        ImageClassification(str(folder), **SMALL)
    assert len(task.samples_of(str(folder), labelled=False)) == 6 * len(folders) + 1
    (folder / "a/empty").mkdir(parents=True, exist_ok=True)
    found = check_data(str(folder))
    assert found.unusable == [(str(folder / loose), "it is next to the class folders")]


def test_two_metadata_files_are_rejected(tmp_path):
    folder = described(tmp_path / "data", rows_with(["a", "b"]))
    (folder / "metadata.jsonl").write_text('{"file_name": "000.png", "label": "c"}\n')
    with pytest.raises(ValueError, match=r"has metadata\.csv and metadata\.jsonl; keep one"):
        ImageClassification(str(folder), **SMALL)


def test_a_column_of_several_types_is_ignored_unless_it_is_read(tmp_path):
    rows = [{**row, "box": n if n % 2 else [1]} for n, row in enumerate(rows_with(["a", "b"]))]
    folder = described(tmp_path / "data", rows, "jsonl")
    assert ImageClassification(str(folder), **SMALL).classes == ["a", "b"]
    with pytest.raises(ValueError, match="'box' must hold values of one type"):
        ImageClassification(str(folder), label="box", **SMALL)


@pytest.mark.parametrize(
    ("ending", "used"), [("jfif", 24), ("jpe", 24), ("JPG", 24), ("heic", 16), ("raw", 16)]
)
def test_no_image_disappears_without_a_line(tmp_path, ending, used):
    for label in "ab":
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(12):
            name = f"{number:02d}.{ending if label == 'b' and number < 8 else 'jpg'}"
            picture(number).save(tmp_path / "data" / label / name, format="jpeg")
    task = ImageClassification(str(tmp_path / "data"), **SMALL)
    assert sum(map(len, (task.train_set(), *task.eval_sets().values()))) == used
    told = any(f"files that are not read: 8 .{ending}" in note for note in task.notes)
    assert told == (used == 16)


def photo(file: Path, orientation: int, blue: int = 0) -> None:
    """Write 40 x 60 pixels with a red upper half, to be turned."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    pixels[:20] = (255, 0, blue)
    about = Image.Exif()
    about[0x0112] = orientation
    Image.fromarray(pixels).save(file, exif=about)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_as_by_datasets(tmp_path, ending, orientation):
    file = tmp_path / f"photo.{ending}"
    photo(file, orientation)
    with Image.open(file) as opened:
        right = np.asarray(ImageOps.exif_transpose(opened).convert("RGB")).astype(int)
    for stored in ({"bytes": None, "path": str(file)}, {"bytes": file.read_bytes(), "path": None}):
        ours = np.asarray(decoded(stored, 10**8).image).astype(int)
        assert ours.shape == right.shape and np.abs(ours - right).max() <= 1


@pytest.mark.parametrize("field", [0x011A, 0x0100, 0x0128])
def test_an_odd_field_of_exif_does_not_matter(tmp_path, field):
    """A resolution or width that is text cannot be written again."""
    pixels = np.zeros((40, 60, 3), np.uint8)
    about = Image.Exif()
    about[0x0112] = 6
    about[0x010F] = "x" * 9
    Image.fromarray(pixels).save(tmp_path / "photo.jpg", exif=about)
    content = (tmp_path / "photo.jpg").read_bytes()
    for order in ("big", "little"):  # give the text another meaning
        content = content.replace((0x010F).to_bytes(2, order), field.to_bytes(2, order), 1)
    assert decoded(content, 10**8).image.size == (40, 60)


def test_packed_metadata_is_rejected(tmp_path):
    folder = described(tmp_path / "data", rows_with(["a", "b"]))
    (folder / "metadata.csv").rename(folder / "metadata.csv.gz")
    with pytest.raises(ValueError, match=r"metadata\.csv\.gz is compressed"):
        ImageClassification(str(folder), **SMALL)


def test_only_columns_that_are_read_matter(tmp_path):
    """An unused column may hold anything; what is read must be text."""
    rows = [
        {**row, "size": n + 0.5, "when": "2024-01-05"}
        for n, row in enumerate(rows_with(["a", "b"]))
    ]
    folder = described(tmp_path / "numbers", rows)
    assert ImageClassification(str(folder), **SMALL).classes == ["a", "b"]
    folder = described(tmp_path / "bytes", rows_with(["a", "b"]))
    content = (folder / "metadata.csv").read_bytes()
    (folder / "metadata.csv").write_bytes(content.replace(b"000.png,a", b"000.png,\xe9"))
    with pytest.raises(ValueError, match=r"metadata\.csv, line 2: 'label' is not valid Unicode"):
        ImageClassification(str(folder), **SMALL)
    (folder / "metadata.csv").write_bytes(b"file_name,label,label\n000.png,a,b\n")
    with pytest.raises(ValueError, match="has two columns 'label'"):
        ImageClassification(str(folder), **SMALL)
    odd = [{**row, "o": {"when": datetime(2024, 1, 5)}} for row in rows_with(["a", "b"])]
    assert ImageClassification(str(described(tmp_path / "o", odd, "parquet")), **SMALL).classes


@pytest.mark.parametrize("kind", ["folders", "parquet"])
def test_turned_images_are_reported_and_seen_by_all(tmp_path, kind):
    """Training, evaluation and prediction see the turned image."""
    plain, turned = tmp_path / "plain", tmp_path / "turned"
    for folder, orientation in ((plain, 1), (turned, 6)):
        rows = []
        for label in "ab":
            (folder / label).mkdir(parents=True)
            for number in range(12):
                file = folder / label / f"{number:02d}.png"
                photo(file, orientation if number == 3 else 1, number)
                rows.append({"image": file.read_bytes(), "label": label, "id": number})
        if kind == "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), folder.with_suffix(".parquet"))

    for folder in (plain, turned):
        where = folder.with_suffix(".parquet") if kind == "parquet" else folder
        task = ImageClassification(str(where), augment=False, **SMALL)
        assert any("EXIF" in note for note in task.notes) == (folder == turned)
        same = task.samples_of(str(where), labelled=True)
        red = [float(same[n][0][0, :, :4].mean()) for n in range(len(same))]
        assert (min(red) < 0.0) == (folder == turned)  # the left is not red once it is turned
