"""Rows that are read over a network are not all checked before a run: some are, the others while
they are read.

The rows of these tests are on a disk, and only say that they are remote.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file

from oneloop.data.skipped_rows import SkipSample
from oneloop.tasks.image_classification import ImageClassification
from oneloop.tasks.rows.remote_checks import sampled
from oneloop.tasks.text_classification import TextClassification
from oneloop.tasks.text_pairs import TextPairs
from oneloop.tasks.text_regression import TextRegression
from oneloop.tasks.token_classification import TokenClassification
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.network_traffic",
    "oneloop.data.skipped_rows",
    "oneloop.data.seeded_samples",
    "oneloop.job.task",
    "oneloop.tasks.columns",
    "oneloop.tasks.labels",
    "oneloop.tasks.rows.remote_checks",
)

SMALL: dict[str, Any] = {"layers": 1, "heads": 1, "width": 8, "length": 16}


def be_remote() -> None:
    """Let all rows of Parquet files say that they are remote."""
    from oneloop.tasks.rows import open_data
    from oneloop.tasks.rows.parquet import Parquet
    from oneloop.tasks.rows.parquet_files import LocalFile
    from oneloop.tasks.rows.remote.remote_parquet import RemoteParquet

    opened = open_data.parquets
    LocalFile.ranges = lambda self, group, columns: ()

    class Pretended(Parquet):
        remote = True
        traffic = RemoteParquet.traffic

    def remote(*given: Any, **named: Any) -> Any:
        parts = opened(*given, **named)
        for rows in parts.values():
            rows.__class__ = Pretended
        return parts

    open_data.parquets = remote


def train_remote(words: list[str]) -> None:
    be_remote()
    train(words)


@pytest.fixture
def remote(monkeypatch, tmp_path):
    from oneloop.tasks.rows import open_data

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(open_data, "parquets", open_data.parquets)
    be_remote()


def rows_of(number: int) -> list[dict[str, Any]]:
    return [{"text": f"text {at} " * 2, "label": "ab"[at % 2]} for at in range(number)]


def written(folder: Path, rows: list[dict[str, Any]], group: int = 8, schema: Any = None) -> Path:
    """Write rows as a training split in small groups, and a validation split of good rows."""
    folder.mkdir(exist_ok=True)
    table = pa.Table.from_pylist(rows, schema=schema)
    parquet.write_table(table, folder / "train.parquet", row_group_size=group)
    parquet.write_table(table[:8], folder / "validation.parquet", row_group_size=group)
    return folder


def reads(monkeypatch) -> list[tuple[int, list[str]]]:
    """Return a list that gets each read of a group: its number and columns."""
    from oneloop.tasks.rows.parquet_files import LocalFile

    seen = []
    read = LocalFile.read

    def counted(self: Any, group: int, columns: Any) -> Any:
        if self.name == "train.parquet":
            seen.append((group, list(columns)))
        return read(self, group, columns)

    monkeypatch.setattr(LocalFile, "read", counted)
    return seen


def test_some_rows_of_all_parts_are_checked_and_all_labels(remote, monkeypatch, tmp_path):
    data = written(tmp_path / "data", rows_of(4000), group=100)
    seen = reads(monkeypatch)
    task = TextClassification(str(data), **SMALL)
    assert "of 4,008 rows, 1,008 were checked; the others are checked while they are read" in (
        task.notes
    )
    texts = [group for group, columns in seen if columns == ["text"]]
    assert len(texts) == 10 and min(texts) == 0 and max(texts) == 39
    assert [group for group, columns in seen if columns == ["label"]] == list(range(40))
    assert task.classes == ["a", "b"]


def test_few_rows_of_a_large_group_are_checked(remote, tmp_path):
    data = written(tmp_path / "data", rows_of(6000), group=3000)
    rows = TextClassification(str(data), **SMALL).train_set().rows
    assert len(rows) == 6000 and len(sampled(rows)) == 1000


def test_classes_of_the_schema_are_read_until_all_have_occurred(remote, monkeypatch, tmp_path):
    from datasets import ClassLabel, Features, Value

    rows = [{"text": f"text {at}", "label": at % 2} for at in range(4000)]
    for number, names in (("few", ["b", "a"]), ("more", ["b", "a", "never"])):
        kinds = Features({"text": Value("string"), "label": ClassLabel(names=names)})
        data = written(tmp_path / number, rows, group=100, schema=kinds.arrow_schema)
        with monkeypatch.context() as patch:
            seen = reads(patch)
            task = TextClassification(str(data), **SMALL)
        labels = [group for group, columns in seen if columns == ["label"]]
        assert len(labels) == (1 if number == "few" else 40)
        assert task.classes == ["b", "a"]


def test_many_bytes_of_labels_are_rejected(remote, monkeypatch, tmp_path):
    from oneloop.tasks.rows import remote_checks

    monkeypatch.setattr(remote_checks, "_LABEL_BYTES", 500)
    data = written(tmp_path / "data", rows_of(100))
    with pytest.raises(ValueError, match=r"'label'.*would have to be read.*ClassLabel.*a disk"):
        TextClassification(str(data), **SMALL)


def test_a_task_is_that_of_a_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    data = written(tmp_path / "data", rows_of(3000), group=100)
    disk = TextClassification(str(data), **SMALL)
    from oneloop.tasks.rows import open_data

    monkeypatch.setattr(open_data, "parquets", open_data.parquets)
    be_remote()
    remote = TextClassification(str(data), **SMALL)
    one, other = disk.train_set(), remote.train_set()
    assert disk.classes == remote.classes
    orders = [part.order(seed=0, batch=8).at(np.arange(500)) for part in (one, other)]
    assert np.array_equal(orders[0][1], orders[1][1])
    for index in (0, 1499, 2999):
        assert one[index] == other[index]


def png(side: int = 8) -> bytes:
    stream = io.BytesIO()
    draw = np.random.default_rng(side)
    Image.fromarray(draw.integers(0, 255, (side, side, 3), dtype=np.uint8)).save(stream, "png")
    return stream.getvalue()


def of_texts(bad: dict[str, Any]) -> list[dict[str, Any]]:
    rows = rows_of(4000)
    rows[1505] |= bad
    return rows


def with_bytes(folder: Path, *bad: int, rows: int = 4000, column: str = "text") -> Path:
    """Write rows of texts, of which some are bytes that are not UTF-8."""
    data = written(folder, rows_of(rows), group=100)
    table = parquet.read_table(data / "train.parquet")
    values = [text.encode() for text in table[column].to_pylist()]
    for at in bad:
        values[at] = b"\xff" + values[at]
    stored = pa.array(values, pa.binary())
    texts = pa.Array.from_buffers(pa.string(), len(stored), stored.buffers())
    at = table.column_names.index(column)
    table = table.set_column(at, column, texts)
    parquet.write_table(table, data / "train.parquet", row_group_size=100)
    return data


def of_numbers(bad: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{"text": f"{at}", "label": at / 7} for at in range(4000)]
    rows[1505]["label"] = bad
    return rows


def of_words(bad: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"tokens": ["one", "two"], "tags": ["x", "y"]} for _ in range(4000)
    ]
    rows[1505] |= bad
    return rows


def of_images(bad: bytes) -> list[dict[str, Any]]:
    image = png()
    rows = [{"image": image, "label": "ab"[at % 2]} for at in range(4000)]
    rows[1505]["image"] = bad
    return rows


LIMIT = {"image_size": 8, "width": 8, "pixel_limit": 100}
PAIRS = {"second": "other"}


@pytest.mark.parametrize(
    ("task", "keys", "rows", "why"),
    [
        (TextClassification, SMALL, of_texts({"text": None}), "no value in 'text'"),
        (
            TextClassification,
            SMALL | PAIRS,
            [{"other": "more"} | row for row in of_texts({"other": None})],
            "no value in 'other'",
        ),
        (TextRegression, SMALL, of_numbers(math.nan), "nan in 'label' is not a finite number"),
        (TextRegression, SMALL, of_numbers(None), "no value in 'label'"),
        (TokenClassification, SMALL, of_words({"tokens": []}), "no value in 'tokens'"),
        (TokenClassification, SMALL, of_words({"tokens": ["one", None]}), "no value in 'tokens'"),
        (TokenClassification, SMALL, of_words({"tokens": ["one"]}), "1 words and 2 tags"),
        (ImageClassification, LIMIT, of_images(png()[:60]), "cannot be read as an image"),
        (ImageClassification, LIMIT, of_images(png(16)), "more than task.pixel_limit 100"),
    ],
)
def test_a_bad_row_is_found_while_it_is_read(remote, tmp_path, task, keys, rows, why):
    data = written(tmp_path / "data", rows, group=100)
    part = task(str(data), **keys).train_set()
    part[1504]
    with pytest.raises(ValueError, match=rf"train\.parquet, row 1505: .*{why}"):
        part[1505]

    # As on a disk, only what cannot be read is skipped: a missing value is an error.
    part = task(str(data), **keys, unreadable="skip").train_set()
    with pytest.raises(ValueError, match=rf"train\.parquet, row 1505: .*{why}") as raised:
        part[1505]
    assert isinstance(raised.value, SkipSample) == (task is ImageClassification)


def test_tokens_are_not_learned_from_remote_texts(remote, tmp_path):
    rows = [{"anchor": f"a {at}", "positive": f"b {at}"} for at in range(100)]
    with pytest.raises(ValueError, match="task.model bpe learns its tokens .* copy of the data"):
        TextPairs(str(written(tmp_path / "data", rows)), length=16)


WORDS = ["digits", "--task", "text_classification", "--task.width", "8", "--task.layers", "1"]
WORDS += ["--task.heads", "1", "--task.length", "16", "--task.data", "data", "--track", "none"]
WORDS += [
    "--batch.size",
    "8",
    "--duration",
    "1ep",
    "--machine.dtype",
    "float64",
    "--log.every",
    "1",
]


def test_a_bad_row_ends_the_run_or_is_left_out_and_listed(tmp_path):
    written(tmp_path / "data", of_texts({"text": None}), group=100)
    words = [*WORDS, "--batch.size", "40", "--duration", "1ep", "--log.every", "50"]
    words += ["--run.dir"]
    world = run(train_remote, [*words, "stopped"], folder=tmp_path)
    assert world.codes == [1], world.output
    assert "train.parquet, row 1505: has no value in 'text'" in world.output

    options = ["--task.unreadable", "skip", "--machine.workers", "2"]
    with_bytes(tmp_path / "data", 1505)
    world = run(train_remote, [*words, "skipped", *options], folder=tmp_path)
    world.ok()
    assert world.output.count("left out (listed in") == 1, world.output
    assert "network: " in world.output and "requests per epoch" in world.output
    (listed,) = (tmp_path / "skipped" / "skipped_rows" / "rank-0.jsonl").read_text().splitlines()
    assert json.loads(listed)["set"] == "train" and json.loads(listed)["sample"] == 1505
    reason = json.loads(listed)["reason"]
    assert "train.parquet, row 1505: a text is not valid Unicode text" in reason


@pytest.mark.parametrize("column", ["text", "label"])
def test_a_text_that_is_not_utf8_is_left_out_on_a_disk_and_in_a_bucket(
    monkeypatch, tmp_path, column
):
    monkeypatch.setenv("ONELOOP_CACHE", str(tmp_path / "cache"))
    data = str(with_bytes(tmp_path / "data", 3, 37, rows=1200, column=column))
    from oneloop.tasks.rows import open_data

    with pytest.raises(
        ValueError, match=rf"2 rows .*, row 3: '{column}' is not valid Unicode text"
    ):
        TextClassification(data, **SMALL)
    disk = TextClassification(data, **SMALL, unreadable="skip")
    first = disk.skipped_rows[0].partition("train.parquet, ")[2]
    assert first.startswith(f"row 3: '{column}' is not valid Unicode text: half of a character")
    assert len(disk.skipped_rows) == 2 and len(disk.train_set()) == 1198
    assert disk.train_set().where(36).endswith("row 38")

    monkeypatch.setattr(open_data, "parquets", open_data.parquets)
    be_remote()
    with pytest.raises(ValueError, match=f"row 3: '{column}' is not valid Unicode text"):
        TextClassification(data, **SMALL)
    remote = TextClassification(data, **SMALL, unreadable="skip")
    assert remote.classes == disk.classes == ["a", "b"]
    samples = iter(range(len(disk.train_set())))
    for index in range(50):
        if index in (3, 37):
            with pytest.raises(SkipSample, match=rf"row {index}: a text is not valid Unicode"):
                remote.train_set()[index]
        else:
            one, other = disk.train_set()[next(samples)], remote.train_set()[index]
            assert one == other


@pytest.mark.slow
def test_with_a_grain_the_bits_are_the_same_without_the_bad_rows(tmp_path):
    with_bytes(tmp_path / "data", 7, 90, 91, 303, rows=400)
    words = [
        *WORDS,
        "--duration",
        "1ep",
        "--task.unreadable",
        "skip",
        "--batch.grain",
        "4",
        "--run.dir",
    ]
    weights = []
    for config, ranks in (("single", 1), ("fsdp2", 2)):
        run(train_remote, [*words, config], config=config, ranks=ranks, folder=tmp_path).ok()
        weights.append((tmp_path / config / "final" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


OWN = """
import torch

from oneloop.data.skipped_rows import SkipSample


class Numbers(torch.utils.data.Dataset):
    skips = True

    def __len__(self):
        return 48

    def __getitem__(self, index):
        if index % 11 == 3:
            raise SkipSample(f"number {index} is bad")
        x = torch.tensor([1.0, index / 48, (index / 48) ** 2], dtype=torch.float64)
        return x, x.sin().sum()


class Mine:
    def model(self):
        model = torch.nn.Sequential(torch.nn.Linear(3, 1))
        torch.nn.init.zeros_(model[0].weight)
        torch.nn.init.zeros_(model[0].bias)
        return model

    def train_set(self):
        return Numbers()

    def eval_sets(self):
        return {"validation": Numbers()}

    def collate(self, samples):
        x, y = zip(*samples)
        return {"x": torch.stack(x), "y": torch.stack(y)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["y"])))

    def loss(self, model, batch):
        each = (model(batch["x"])[:, 0] - batch["y"]) ** 2
        return each.sum(), {"loss": each.detach()}


class Norm(Mine):
    def model(self):
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


class Whole(Mine):
    loss = None

    def embed(self, model, batch):
        return {"one": model(batch["x"])}

    def batch_loss(self, parts, columns):
        return (parts["one"] - parts["one"].mean()).square().sum(), {}


class Bad(Numbers):
    def __getitem__(self, index):
        if index // 4 == 5:
            raise SkipSample(f"number {index} is bad")
        return super().__getitem__(index if index % 11 != 3 else 0)


class Empty(Mine):
    def eval_sets(self):
        return {"validation": Bad()}
"""
OWN_WORDS = [
    "--batch.size",
    "8",
    "--batch.micro",
    "4",
    "--duration",
    "12",
    "--optimizer.name",
    "sgd",
]
OWN_WORDS += ["--optimizer.name", "sgd", "--optimizer.lr", "0.1"]
OWN_WORDS += ["--schedule.name", "constant", "--schedule.warmup", "0"]
OWN_WORDS += ["--optimizer.momentum", "0", "--optimizer.weight_decay", "0", "--optimizer.clip", "0"]
OWN_WORDS += ["--machine.dtype", "float64", "--track", "none", "--log.every", "1", "--run.dir"]


def plain(folder: Path) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights after twelve steps of plain PyTorch, and the loss of the evaluation."""
    scope: dict[str, Any] = {}
    exec((folder / "mine.py").read_text(), scope)
    from oneloop.data.order import order_of

    task = scope["Mine"]()
    data, model = task.train_set(), task.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = order_of(data, seed=0, batch=8, shuffle=True)
    for step in range(12):
        _, indices = order.at(np.arange(8 * step, 8 * step + 8))
        batch = task.collate([data[at] for at in indices.tolist() if at % 11 != 3])
        optimizer.zero_grad()
        (task.loss(model, batch)[0] / len(batch["y"])).backward()
        optimizer.step()
    good = task.collate([data[at] for at in range(48) if at % 11 != 3])
    return model.state_dict(), float(task.loss(model, good)[0].detach() / len(good["y"]))


@pytest.mark.parametrize(
    ("config", "ranks", "workers"),
    [
        pytest.param("single", 1, 2, marks=pytest.mark.slow),
        ("ddp", 2, 0),
        pytest.param("fsdp2", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_the_mean_over_the_good_samples(tmp_path, config, ranks, workers):
    (tmp_path / "mine.py").write_text(OWN)
    words = ["mine.py:Mine", *OWN_WORDS, "run", "--machine.workers", str(workers)]
    run(train, words, config=config, ranks=ranks, folder=tmp_path).ok()
    weights = load_file(tmp_path / "run" / "final" / "model.safetensors")
    expected, loss = plain(tmp_path)
    for name, tensor in expected.items():
        assert torch.allclose(weights[name], tensor, rtol=1e-12, atol=1e-14)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    measured = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert measured[-1] == pytest.approx(loss, rel=1e-12)
    files = (tmp_path / "run" / "skipped_rows").glob("*.jsonl")
    found = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    listed = {line["sample"] for line in found if line["set"] == "train"}
    assert listed == {3, 14, 25, 36, 47}


@pytest.mark.parametrize(
    ("task", "why"), [("Norm", "the model has BatchNorm"), ("Whole", "the loss of each sample")]
)
def test_samples_that_cannot_be_left_out_exactly_are_rejected(tmp_path, task, why):
    (tmp_path / "mine.py").write_text(OWN)
    world = run(train, [f"mine.py:{task}", *OWN_WORDS, "run"], folder=tmp_path)
    assert (
        world.codes == [2] and f"cannot be left out while they are read: {why}" in world.output
    ), world.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_micro_batch_without_a_good_sample_ends_the_run(tmp_path, workers):
    (tmp_path / "mine.py").write_text(OWN)
    words = ["mine.py:Empty", *OWN_WORDS, "run", "--machine.workers", str(workers)]
    world = run(train, words, folder=tmp_path)
    assert world.codes == [1], world.output
    assert "no row of a micro-batch of 4 can be used, the first: number 20 is bad" in world.output


def test_the_traffic_is_that_of_the_used_columns(remote, monkeypatch, tmp_path):
    from oneloop.tasks.rows.mixture import Mixture
    from oneloop.tasks.rows.parquet_files import LocalFile

    monkeypatch.setattr(LocalFile, "ranges", lambda *_: [(0, 1), (2, 3)])
    data = written(tmp_path / "data", [row | {"unused": 1.0} for row in rows_of(1000)], group=100)
    part = TextClassification(str(data), **SMALL).train_set()
    footer = parquet.ParquetFile(data / "train.parquet").metadata
    groups = [footer.row_group(group) for group in range(10)]
    size = sum(group.column(at).total_compressed_size for group in groups for at in (0, 1))
    assert part.traffic == (size / 1000, 20 / 1000)
    mixed = Mixture({"one": part, "disk": [0] * 50}, weights=[1, 3])
    assert mixed.traffic == pytest.approx((size / 4000, 20 / 4000))
    line = part.traffic.line(len(part), batch=50, steps=40, hosts=2)
    assert f"{size / 20 / 1e6:,.3g} MB per step" in line and "in 20 requests per epoch" in line
    assert "each of 2 hosts reads at least 50% of it" in line
