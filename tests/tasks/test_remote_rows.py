"""Training on rows in a bucket, on a hub or on a web server has the bits of training on a disk."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import load_file

import small_models
from hub_server import Hub
from remote_data import Files, counted_s3
from worlds import apply, run, train

pytestmark = pytest.mark.covers(
    "oneloop.tasks.rows.remote.remote_parquet",
    "oneloop.tasks.rows.remote.row_group_cache",
)

ROWS, GROUP = 1000, 25  # rows of the training set, and of a row group
SMALL = "--task.layers 1 --task.width 8 --task.heads 1 --task.length 16 --task.window 1"
COMMON = (
    "--batch.size 16 --batch.grain 4 --duration 80 --save.every 20 --eval.every 40 --track none "
    "--run.dir run --optimizer.name adamw --optimizer.lr 0.01 --machine.dtype float32 "
    "--schedule.name constant --schedule.warmup 5 --log.every 20"
)
TEXTS = f"snippets {SMALL} {COMMON}"


def texts(number: int, seed: int) -> pyarrow.Table:
    """Return texts of 4 KB, so that only a few groups fit into the window, and their classes."""
    draw = np.random.default_rng(seed)
    words = [f"{at % 7} {at} " + draw.bytes(2000).hex() for at in range(number)]
    labels = ["ab"[at % 7 % 2] for at in range(number)]
    return pyarrow.table({"text": words, "label": labels, "unused": words})


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("disk") / "data"
    folder.mkdir()
    for part in range(2):
        table = texts(ROWS // 2, seed=part)
        parquet.write_table(table, folder / f"train-{part}.parquet", row_group_size=GROUP)
    parquet.write_table(texts(100, seed=9), folder / "validation.parquet", row_group_size=GROUP)
    return folder


@pytest.fixture(scope="module")
def s3(disk):
    with counted_s3() as server:
        server.copy(disk, "s3://bucket/data")
        yield server


def trained(folder: Path, words: str, *, s3=None, config: str = "single", ranks: int = 1, **more):
    """Train, and return what has run and the final weights."""
    folder.mkdir(exist_ok=True)
    variables = {"ONELOOP_CACHE": str(folder.parent / "cache"), **(s3.variables if s3 else {})}
    variables |= more.pop("variables", {})
    world = run(
        train, words.split(), config=config, ranks=ranks, folder=folder, variables=variables, **more
    )
    assert world.codes == [0] * ranks, world.output
    return world, load_file(folder / "run" / "final" / "model.safetensors")


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def expected(disk, tmp_path_factory):
    """The weights of a run on the disk."""
    _, weights = trained(tmp_path_factory.mktemp("expected"), f"{TEXTS} --task.data {disk}")
    return weights


LAYOUTS = [
    pytest.param(config, ranks, workers, marks=() if fast else pytest.mark.slow)
    for config, ranks, workers, fast in [
        ("single", 1, 0, False),
        ("single", 1, 2, True),
        ("ddp", 2, 0, False),
        ("ddp", 2, 2, False),
        ("fsdp2", 2, 0, False),
        ("fsdp2", 2, 2, False),
    ]
]


@pytest.mark.parametrize(("config", "ranks", "workers"), LAYOUTS)
def test_a_bucket_gives_the_bits_of_a_disk(s3, expected, tmp_path, config, ranks, workers):
    s3.proxy.seen.clear()
    words = f"{TEXTS} --task.data s3://bucket/data --machine.workers {workers}"
    world, weights = trained(tmp_path / "away", words, s3=s3, config=config, ranks=ranks)
    assert_equal(weights, expected)
    assert "network: " in world.output

    # Read were the rows of the check (all, since they are few), 1.28 epochs, what was fetched ahead
    # (two windows), and three times the validation set; and never the column that is not used.
    rows = ROWS + 1.28 * ROWS + 2 * 2**20 / 4000 + 4 * 100
    assert sum(one.end - one.start for one in s3.proxy.ranges("data")) < 1.05 * 4000 * rows


@pytest.mark.slow
def test_a_run_moves_from_a_disk_to_a_bucket_and_back(s3, disk, expected, tmp_path):
    folder = tmp_path / "moves"
    trained(folder, f"{TEXTS} --task.data {disk}".replace("--duration 80", "--duration 30"))
    words = f"{TEXTS} --task.data s3://bucket/data".replace("--duration 80", "--duration 60")
    trained(folder, words, s3=s3)
    _, weights = trained(folder, f"{TEXTS} --task.data {disk}")
    assert_equal(weights, expected)


@pytest.mark.slow
def test_a_mixture_of_a_bucket_and_a_disk(s3, disk, tmp_path):
    (tmp_path / "other").mkdir()
    parquet.write_table(texts(300, 5), tmp_path / "other/train.parquet", row_group_size=GROUP)
    parquet.write_table(texts(50, 6), tmp_path / "other/validation.parquet")

    def mixture(where: str) -> str:
        parts = [f"{{data: {where}, weight: 0.7, name: one}}"]
        parts.append(f"{{data: {tmp_path / 'other'}, weight: 0.3, name: two}}")
        (tmp_path / "mixed.yaml").write_text(
            "task: {name: text_classification, layers: 1, width: 8, heads: 1, length: 16, window: "
            f"1, data: [{', '.join(parts)}]}}\n"
        )
        return f"{tmp_path / 'mixed.yaml'} {COMMON}"

    _, here = trained(tmp_path / "here", mixture(str(disk)))
    words = mixture("s3://bucket/data")
    _, away = trained(tmp_path / "away", words, s3=s3, config="fsdp2", ranks=2)
    assert_equal(here, away)


@pytest.mark.slow
def test_images_in_rows(s3, tmp_path):
    draw = np.random.default_rng(0)

    def picture() -> bytes:
        stream = io.BytesIO()
        Image.fromarray(draw.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(stream, "png")
        return stream.getvalue()

    folder = tmp_path / "pictures"
    folder.mkdir()
    for split, number in (("train", 600), ("validation", 60)):
        table = pyarrow.table(
            {
                "image": [{"bytes": picture(), "path": None} for _ in range(number)],
                "label": [at % 3 for at in range(number)],
            }
        )
        parquet.write_table(table, folder / f"{split}.parquet", row_group_size=20)
    s3.copy(folder, "s3://bucket/pictures")
    words = f"images --task.window 1 --task.image_size 16 --task.model cnn {COMMON}"
    _, here = trained(tmp_path / "here", f"{words} --task.data {folder}")
    words = f"{words} --task.data s3://bucket/pictures --machine.workers 2"
    _, away = trained(tmp_path / "away", words, s3=s3)
    assert_equal(here, away)


@pytest.mark.slow
def test_a_hub_and_a_web_server(disk, expected, tmp_path):
    with Files(disk) as web:
        _, weights = trained(tmp_path / "web", f"{TEXTS} --task.data {web.list()}")
        assert_equal(weights, expected)
    (disk / "list.txt").unlink()

    with Hub(tmp_path / "hub", "some/texts") as hub:
        hub.commit({file.name: [{"a": 1}] for file in disk.glob("*.parquet")})
        shutil.copytree(disk, hub.folder / hub.head, dirs_exist_ok=True)
        variables = hub.variables(tmp_path / "hf")
        for number, where in enumerate(
            ("hf://datasets/some/texts", "hf:some/texts --task.stream true")
        ):
            words = f"{TEXTS} --task.data {where}"
            _, weights = trained(tmp_path / f"hub-{number}", words, variables=variables)
            assert_equal(weights, expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it starts the launcher 20 to 30 times
def test_twenty_kills_with_changing_layouts(s3, disk, tmp_path):
    long = TEXTS.replace("--duration 80", "--duration 400")
    long = long.replace("--save.every 20", "--save.every 4")
    _, expected = trained(tmp_path / "expected", f"{long} --task.data {disk}")
    draw = random.Random(0)
    folder = tmp_path / "killed"
    folder.mkdir()
    environment = {
        **os.environ,
        **s3.variables,
        "ONELOOP_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    words = f"{long} --task.data s3://bucket/data"
    kills = 0
    for _ in range(30):
        ranks = draw.choice([1, 2])
        config = "single" if ranks == 1 else draw.choice(["ddp", "fsdp2"])
        launch = [sys.executable, "-m", "oneloop", "launch", "--config_file", str(_config(config))]
        launch += ["--num_processes", str(ranks)] if ranks > 1 else []
        launch += [*words.split(), "--machine.workers", str(draw.choice([0, 2]))]
        before = _last_step(folder)
        process = subprocess.Popen(
            launch,
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until = time.monotonic() + 120
        while process.poll() is None and _last_step(folder) == before and time.monotonic() < until:
            time.sleep(0.02)
        if process.poll() is not None:
            assert process.returncode == 0 and kills >= 20
            break
        time.sleep(draw.uniform(0, 0.1))
        os.killpg(process.pid, 9)
        process.wait()
        kills += 1
        time.sleep(0.5)
    _, weights = trained(folder, words, s3=s3)
    assert kills >= 20
    assert_equal(weights, expected)


def _last_step(folder: Path) -> int:
    checkpoints = (folder / "run" / "checkpoints").glob("step-*[0-9]")
    return max((int(path.name[5:]) for path in checkpoints), default=0)


def _config(name: str) -> Path:
    return Path(__file__).parents[2] / "accelerate_configs" / f"{name}.yaml"


@pytest.mark.slow
def test_commands_read_a_bucket(s3, disk, tmp_path):
    folder = tmp_path / "commands"
    trained(folder, f"{TEXTS} --task.data {disk}")
    variables = {**s3.variables, "OMP_NUM_THREADS": "1"}
    for words in ("evaluate run --data {}", "predict run --data {} --to {}.jsonl"):
        outputs = []
        for name, where in (("here", disk), ("away", "s3://bucket/data")):
            given = words.format(f"{where}/validation.parquet", name).split()
            world = run(apply, given, config="single", folder=folder, variables=variables)
            assert world.codes == [0], world.output
            outputs.append([line for line in world.output.splitlines() if "loss" in line])
        if words.startswith("evaluate"):
            assert outputs[0] and outputs[0] == outputs[1]
    rows = [(folder / f"{name}.jsonl").read_text().splitlines() for name in ("here", "away")]
    assert len(rows[0]) == 100 and rows[0] == rows[1]


def _changed(server, name: str) -> None:
    parts = {f"train-{part}.parquet": texts(ROWS // 2, seed=part + 50) for part in range(2)}
    for file, table in parts.items():
        stream = io.BytesIO()
        parquet.write_table(table, stream, row_group_size=GROUP)
        server.write(f"s3://bucket/{name}/{file}", stream.getvalue())


FAULTS = {
    "denied": (lambda s3, name: setattr(s3.proxy, "denied", "AccessDenied"), "AccessDenied"),
    "expired": (lambda s3, name: setattr(s3.proxy, "denied", "ExpiredToken"), "ExpiredToken"),
    "broken": (lambda s3, name: setattr(s3.proxy, "broken", "train-"), "Unavailable"),
    "down": (lambda s3, name: setattr(s3.proxy, "down", True), "onnect"),
    "changed": (_changed, "has changed since this run listed it"),
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_store_that_fails_ends_the_run_with_its_address(s3, disk, tmp_path, fault, workers):
    name = f"{fault}-{workers}"
    s3.copy(disk, f"s3://bucket/{name}")
    s3.proxy.seen.clear()
    begin, words = FAULTS[fault]

    def watch() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.01)
        begin(s3, name)

    threading.Thread(target=watch, daemon=True).start()
    try:
        given = f"{TEXTS} --task.data s3://bucket/{name} --machine.workers {workers}"
        given = given.replace("--duration 80", "--duration 3000")
        variables = {**s3.variables, "ONELOOP_CACHE": str(tmp_path / "cache")}
        world = run(train, given.split(), config="single", folder=tmp_path, variables=variables)
    finally:
        s3.proxy.denied = s3.proxy.broken = ""
        s3.proxy.down = False
    assert world.codes == [1], world.output
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"]
    assert f"s3://bucket/{name}/train-" in ended and words in ended, ended
    assert "SeCrEt" not in world.output


@pytest.mark.slow
def test_pairs_with_a_saved_model(s3, tmp_path):
    base = small_models.bert(tmp_path / "base", positions=32)
    folder = tmp_path / "pairs"
    folder.mkdir()
    for split, number in (("train", 600), ("validation", 60)):
        table = texts(number, seed=3).rename_columns(["anchor", "positive", "unused"])
        table = table.set_column(1, "positive", table.column("anchor"))
        parquet.write_table(table, folder / f"{split}.parquet", row_group_size=20)
    s3.copy(folder, "s3://bucket/pairs")
    words = f"docstrings --task.model {base} --task.window 1 --task.length 16 {COMMON}"
    _, here = trained(tmp_path / "here", f"{words} --task.data {folder}")
    words = f"{words} --task.data s3://bucket/pairs --machine.workers 1"
    _, away = trained(tmp_path / "away", words, s3=s3, config="ddp", ranks=2)
    assert_equal(here, away)


def test_denied_access_is_found_at_the_start(s3, tmp_path):
    s3.proxy.denied = "AccessDenied"
    try:
        given = f"{TEXTS} --task.data s3://bucket/data".split()
        variables = {**s3.variables, "ONELOOP_CACHE": str(tmp_path / "cache")}
        world = run(train, given, config="single", folder=tmp_path, variables=variables)
    finally:
        s3.proxy.denied = ""
    assert world.codes == [2] and "s3://bucket/data" in world.output, world.output
    assert "check address and credentials" in world.output
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_plan_states_what_comes_over_the_network(s3, tmp_path):
    words = f"plan {TEXTS} --task.data s3://bucket/data"
    done = subprocess.run(
        [sys.executable, "-m", "oneloop", *words.split()],
        cwd=tmp_path,
        env={**os.environ, **s3.variables, "ONELOOP_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    # Text and label are neighbours: one request for each of the 40 row groups.
    assert done.returncode == 0 and "in 40 requests per epoch" in done.stdout, done.stdout


OWN = """
from functools import partial
import torch
from torch import nn
from oneloop.tasks.rows.open_data import Source, opened, sets_of


def made(row):
    first, second = row["text"].split()[:2]
    return torch.tensor([float(first), float(len(second))]), row["label"] == "a"


class Own:
    def __init__(self, data: str) -> None:
        source = Source(data, {"text": "text", "label": "label"})
        self._sets = sets_of([opened(source, held_out=0.05, window=1)], lambda source: made)

    def model(self):
        return nn.Linear(2, 1)

    def train_set(self):
        return self._sets["train"]

    def eval_sets(self):
        return {"validation": self._sets["validation"]}

    def collate(self, samples):
        inputs, labels = zip(*samples, strict=True)
        return {"x": torch.stack(inputs), "y": torch.tensor(labels, dtype=torch.float32)}

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return ((model(batch["x"])[:, 0] - batch["y"]) ** 2).sum(), {}
"""


@pytest.mark.slow
def test_a_task_of_the_user(s3, disk, tmp_path):
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(OWN)
    words = f"own.py:Own {COMMON}"
    _, here = trained(tmp_path / "here", f"{words} --task.data {disk}")
    words = f"{words} --task.data s3://bucket/data --machine.workers 2"
    _, away = trained(tmp_path / "away", words, s3=s3, config="fsdp2", ranks=2)
    assert_equal(here, away)


@pytest.mark.slow
def test_a_store_that_hangs_ends_the_run(s3, disk, tmp_path):
    """Five tries of 15 s, and the waits between them."""
    s3.copy(disk, "s3://bucket/hangs")

    def watch() -> None:
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            time.sleep(0.01)
        s3.proxy.hangs = "train-"

    threading.Thread(target=watch, daemon=True).start()
    try:
        given = f"{TEXTS} --task.data s3://bucket/hangs --machine.workers 0"
        given = given.replace("--duration 80", "--duration 3000")
        variables = {**s3.variables, "ONELOOP_CACHE": str(tmp_path / "cache")}
        world = run(
            train,
            given.split(),
            config="single",
            folder=tmp_path,
            variables=variables,
            timeout=200,
            watch=True,
        )
    finally:
        s3.proxy.hangs = ""
    assert world.codes == [1], world.output
    ended = json.loads((tmp_path / "run" / "summary.json").read_text())["exit_reason"]
    assert "s3://bucket/hangs/train-" in ended, ended
