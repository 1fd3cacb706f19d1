"""``oneloop check``, and images that cannot be used: found before the run, skipped alike on every
rank."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from oneloop.tasks.rows.images import decoded
from silent_cases import BASE
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.columns",
    "oneloop.tasks.rows.images",
    "oneloop.tools.check.asked",
    "oneloop.tools.check.check_data",
    "oneloop.tools.check.command",
)

SMALL = ["digits", "--task", "image_classification", "--task.image_size", "8", "--task.width", "8"]
SMALL += ["--task.held_out", "0.2", "--duration", "2", "--batch.size", "8", "--track", "none"]
SMALL += ["--save.every", "0"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Return a folder with 48 good images, three that are converted, two that cannot be used and an
    empty class."""
    folder = tmp_path_factory.mktemp("check") / "photos"
    draw = np.random.default_rng(0)

    def pixels(*shape: int, kind: type = np.uint8) -> Image.Image:
        return Image.fromarray(draw.integers(0, np.iinfo(kind).max, shape).astype(kind))

    for label in ("cat", "cow", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(16):
            pixels(8, 8, 3).save(folder / label / f"{number:02d}.png")
    pixels(32, 32, 3).convert("CMYK").save(folder / "cat" / "cmyk.jpg")
    pixels(8, 8, 4).save(folder / "dog" / "rgba.png")
    pixels(8, 8, kind=np.uint16).save(folder / "dog" / "wide.png")
    pixels(64, 64, 3).save(folder / "cow" / "cut.jpg")
    cut = (folder / "cow" / "cut.jpg").read_bytes()
    (folder / "cow" / "cut.jpg").write_bytes(cut[: len(cut) // 2])
    (folder / "cow" / "text.png").write_text("this is text\n")
    (folder / "bird").mkdir()
    return folder


def command(words: list[str]) -> None:
    from oneloop.cli import main

    sys.path.insert(0, "")
    sys.exit(main(["check", *words]))


def found(text: str) -> dict:
    """Return the JSON of ``oneloop check … --json`` from the output of a process."""
    return json.loads(next(line for line in text.splitlines() if line.startswith('{"rows"')))


@pytest.mark.parametrize(
    "words", [["photos"], ["digits", "--task", "image_classification", "--task.data", "photos"]]
)
def test_a_check_lists_all_that_cannot_be_used(photos, words):
    world = run(command, [*words, "--json"], folder=photos.parent)
    assert world.codes == [1], world.output
    result = found(world.output)
    reasons = sorted(entry["reason"] for entry in result["unusable"])
    assert result["rows"] == 53 and len(reasons) == 2 and result["empty"] == ["photos/bird"]
    assert "cow/cut.jpg" in reasons[0] and "truncated" in reasons[0]
    assert "cow/text.png" in reasons[1] and "cannot identify" in reasons[1]
    assert result["converted"] == {"16-bit": 1, "CMYK": 1, "RGBA": 1}


def test_a_run_stops_before_it_starts_or_skips_the_same_images_on_all_ranks(photos, tmp_path):
    words = [*SMALL, "--task.data", str(photos), "--run.dir"]
    world = run(train, [*words, "stopped"], folder=tmp_path)
    assert world.codes == [2] and "2 of 53 images cannot be used" in world.output, world.output
    assert "task.unreadable skip" in world.output and not (tmp_path / "stopped").exists()
    weights, skipped = [], []
    for config, ranks in (("single", 1), ("ddp", 2)):
        options = [*words, config, "--task.unreadable", "skip", "--machine.dtype", "float64"]
        run(train, options, config=config, ranks=ranks, folder=tmp_path).ok()
        weights.append(load_file(tmp_path / config / "final" / "model.safetensors"))
        skipped.append(
            json.loads((tmp_path / config / "environment.json").read_text())["skipped_rows"]
        )
    assert len(skipped[0]) == 2 and skipped[1:] == skipped[:1]
    for other in weights[1:]:
        assert all(
            torch.allclose(other[name], tensor, rtol=1e-10) for name, tensor in weights[0].items()
        )


def test_an_image_in_the_test_split_is_found_before_the_run(photos, tmp_path):
    shutil.copytree(
        photos,
        tmp_path / "data" / "train",
        ignore=shutil.ignore_patterns("cut.jpg", "text.png", "bird"),
    )
    for split in ("validation", "test"):
        for label in ("cat", "cow", "dog"):
            (tmp_path / "data" / split / label).mkdir(parents=True)
            shutil.copy(photos / label / "00.png", tmp_path / "data" / split / label / "0.png")
    (tmp_path / "data" / "test" / "cow" / "0.png").write_bytes(b"no image")
    words = [*SMALL, "--task.data", "data", "--run.dir", "run"]
    world = run(train, words, folder=tmp_path)
    assert world.codes == [2] and "test/cow/0.png cannot be read" in world.output, world.output
    run(train, [*words, "--task.unreadable", "skip"], folder=tmp_path).ok()
    content = json.loads((tmp_path / "run" / "environment.json").read_text())["inputs"]
    assert content["test set, length"] == "2" and content["train set, length"] == "51"


def test_images_in_parquet_are_skipped_and_an_empty_class_is_one_of_folders(photos, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    files = sorted(photos.rglob("*.[pj][np]g"))
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": file.name}, "label": file.parent.name}
        for file in files
    ]
    (tmp_path / "data" / "shard").mkdir(parents=True)
    parquet.write_table(
        pa.Table.from_pylist(rows), tmp_path / "data" / "shard" / "a.parquet", row_group_size=10
    )
    result = found(run(command, ["data", "--json"], folder=tmp_path).output)
    assert len(result["unusable"]) == 2 and result["rows"] == 53 and result["empty"] == []
    run(
        train,
        [*SMALL, "--task.data", "data", "--task.unreadable", "skip", "--run.dir", "run"],
        folder=tmp_path,
    ).ok()
    about = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (
        sum(
            int(about["inputs"].get(f"{part} set, length", 0))
            for part in ("train", "validation", "test")
        )
        == 51
        and len(about["skipped_rows"]) == 2
    )


def test_reasons_name_the_present_path_and_keys_belong_to_recipes(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "moved")
    world = run(command, ["moved"], folder=tmp_path)
    assert (
        "moved/cow/text.png cannot be read" in world.output and "photos/cow" not in world.output
    ), world.output
    world = run(command, ["moved", "--task.width", "8"], folder=tmp_path)
    assert world.codes == [2] and "takes no keys" in world.output
    (tmp_path / "rows.jsonl").write_text('{"text": null}\n')
    world = run(command, ["rows.jsonl"], folder=tmp_path)
    assert world.codes == [0] and "check a recipe to check the values" in world.output


def test_sixteen_bits_are_divided_by_257(tmp_path):
    values = np.array([[0, 128, 129, 256], [257, 32768, 65406, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "wide.png")
    stored = {"bytes": None, "path": str(tmp_path / "wide.png")}
    image = np.asarray(decoded(stored, 100).image)
    assert image[..., 0].tolist() == np.round(values / 257).astype(
        int
    ).tolist() and image.shape == (2, 4, 3)


def test_all_rows_of_a_text_task_are_listed(tmp_path):
    rows = [{"text": f"text {n}", "label": "ab"[n % 2]} for n in range(60)]
    rows[3]["label"] = rows[50]["text"] = None
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["digits", "--task", "text_classification", "--task.data", "rows.jsonl", "--json"]
    listed = {
        (entry["row"], entry["reason"].split(";")[0])
        for entry in found(run(command, words, folder=tmp_path).output)["unusable"]
    }
    assert listed == {("row 3", "has no value in 'label'"), ("row 50", "has no value in 'text'")}
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    lines[7] = lines[9] = "{'text'}"
    (tmp_path / "broken.jsonl").write_text("\n".join(lines))
    broken = found(run(command, ["broken.jsonl", "--json"], folder=tmp_path).output)["unusable"]
    assert [entry["row"] for entry in broken if "not JSON:" in entry["reason"]] == [
        "line 8",
        "line 10",
    ]


def test_samples_that_are_cut_from_texts_are_not_called_rows(tmp_path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "one long text " * 900}) + "\n")
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.jsonl").write_text((tmp_path / "one.jsonl").read_text())
    words = ["gpt", "--task.data", "data"]
    world = run(command, words, folder=tmp_path)
    assert re.search(r"gpt: \d+ samples, 0 cannot be used", world.output), world.output


BROKEN = """
    def train_set(self):
        return Broken(self.x, {train})

    def eval_sets(self):
        return {{"validation": Broken(self.x, ()), "test": Broken(self.x, {test})}}


class Broken(torch.utils.data.Dataset):
    def __init__(self, x, bad):
        self.x, self.bad = x, bad

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"sample {{index}} is damaged")
        return self.x[index], self.x[index].sin()
"""


def test_every_sample_of_an_own_task_is_read(tmp_path):
    (tmp_path / "mine.py").write_text(BASE + BROKEN.format(train="(7, 40)", test="()"))
    listed = found(run(command, ["mine.py:Mine", "--json"], folder=tmp_path).output)
    assert [(e["path"], e["row"], e["reason"]) for e in listed["unusable"]] == [
        ("train", "sample 7", "OSError: sample 7 is damaged"),
        ("train", "sample 40", "OSError: sample 40 is damaged"),
    ]
    assert listed["rows"] == 192


@pytest.mark.parametrize(
    ("config", "ranks"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.slow)]
)
def test_a_failing_test_set_does_not_cost_the_final_weights(tmp_path, config, ranks):
    (tmp_path / "mine.py").write_text(BASE + BROKEN.format(train="()", test="(37,)"))
    words = [
        "mine.py:Mine",
        "--duration",
        "3",
        "--batch.size",
        "8",
        "--track",
        "none",
        "--run.dir",
        "run",
    ]
    world = run(train, words, config=config, ranks=ranks, folder=tmp_path)
    assert world.codes == [1] * ranks and "sample 37 is damaged" in world.output, world.output
    assert load_file(tmp_path / "run" / "final" / "model.safetensors")


def test_rows_that_cannot_be_read_are_counted(tmp_path):
    """In a data set and in a recipe, which also checks what the rows hold."""
    from oneloop.tools.check.check_data import check_data

    answer = {"role": "assistant", "content": "a"}
    asked = [{"role": "user", "content": f"q {number}"} for number in range(40)]
    good = [{"messages": [question, answer]} for question in asked]
    lines = [*map(json.dumps, good), "not json", json.dumps({"messages": [{"role": "odd"}]})]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines) + "\n")
    found = check_data(str(tmp_path / "data"))
    assert (found.rows, len(found.unusable)) == (42, 1)
    words = ["--task.data", str(tmp_path / "data"), "--task.unreadable", "skip"]
    found = check_data("sft", words)
    assert len(found.unusable) == 2
    assert "line 41" in found.unusable[0][0] and "role 'odd'" in found.unusable[1][1]
