"""A run with data workers reads no sample in the process that forks them, so a data set may open
its files at the first sample. Errors, examples and data that cannot be sent stay as they are."""

from __future__ import annotations

import json
import pickle
import sqlite3
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection, SumMetric

from oneloop.basics.exit_codes import BadInput
from oneloop.data.sample_reader import CannotSend, _pickled, sample_reader
from oneloop.task_protocol.user_code import theirs
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.data.sample_reader",
    "oneloop.task_protocol.user_code",
)

SIZE = 48
KINDS = ("file", "database", "rows in turn", "file of collate")


class LazyFile:
    """A file with a position, which is opened when it is first read."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = None

    def __getitem__(self, index: int) -> int:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.file.seek(index)
        time.sleep(0.001)  # here another process may move the position that it shares
        return (self.file.read(1) or b"\xff")[0]


class Lazy:
    """Samples from several sources, which are opened at the first sample."""

    def __init__(self, folder: str, size: int) -> None:
        self.folder = folder
        self.size = size
        self.lock = threading.Lock()  # cannot be pickled
        self.file = LazyFile(f"{folder}/rows.bin")
        self.database = None
        self.rows = None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int):
        # A database connection: sqlite forbids its use in a forked process.
        if self.database is None:
            self.database = sqlite3.connect(f"{self.folder}/rows.db")
            self.rows = self.in_turn()
            next(self.rows)
        ((found,),) = self.database.execute("select value from rows where id = ?", (index,))
        return index, {
            "file": self.file[index],
            "database": found,
            "rows in turn": self.rows.send(index),
        }

    def in_turn(self):
        """A generator that keeps its file open."""
        with open(f"{self.folder}/rows.bin", "rb", buffering=0) as file:
            index = yield 0
            while True:
                file.seek(index)
                time.sleep(0.001)
                index = yield (file.read(1) or b"\xff")[0]


class Task:
    """Counts the samples that are wrong, by kind."""

    def __init__(self, folder: str = ".") -> None:
        self.folder = folder
        self.file = LazyFile(f"{folder}/rows.bin")

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def train_set(self) -> Lazy:
        return Lazy(self.folder, SIZE)

    def eval_sets(self) -> dict:
        return {"validation": Lazy(self.folder, SIZE)}

    def collate(self, samples):
        wrong = dict.fromkeys(KINDS, 0)
        for index, found in samples:
            for kind, value in (found | {"file of collate": self.file[index]}).items():
                wrong[kind] += value != index
        counted = {kind: torch.tensor(float(number)) for kind, number in wrong.items()}
        return {"x": torch.ones(len(samples), 1)} | counted

    def weight(self, batch):
        return torch.tensor(float(len(batch["x"])))

    def loss(self, model, batch):
        return model(batch["x"]).square().sum(), {kind: batch[kind] for kind in KINDS}

    def metrics(self):
        return MetricCollection({kind: SumMetric() for kind in KINDS})

    def update(self, metrics, batch, outputs):
        for kind in KINDS:
            metrics[kind].update(outputs[kind])

    def show(self, sample, outputs):
        return {"text": str(sample)}


def write_rows(folder: Path) -> None:
    (folder / "rows.bin").write_bytes(bytes(range(SIZE)))
    with sqlite3.connect(folder / "rows.db") as database:
        database.execute("create table rows (id integer primary key, value integer)")
        database.executemany("insert into rows values (?, ?)", zip(range(SIZE), range(SIZE)))


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_what_is_opened_at_the_first_sample_is_right_in_every_worker(tmp_path, ranks, config):
    write_rows(tmp_path)
    words = ["digits", "--task", "test_sample_reader.Task", "--task.folder", str(tmp_path)]
    words += ["--duration", "6", "--batch.size", "16", "--batch.micro", "4", "--track", "none"]
    words += ["--machine.workers", "3", "--log.every", "1", "--eval.every", "3"]
    run(train, [*words, "--run.dir", "run"], ranks=ranks, config=config, folder=tmp_path).ok()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    wrong = {}
    for line in map(json.loads, lines):
        for name, value in line.items():
            if name.partition("/")[2] in KINDS:
                wrong[name] = wrong.get(name, 0) + value
    assert len(wrong) == 2 * len(KINDS)
    assert not any(wrong.values()), wrong
    shown = json.loads((tmp_path / "run" / "examples.json").read_text())["samples"]
    assert len(shown) == 8


# --- what a reader returns and raises
# --------------------------------------------------------------------------------------------------


def read_once(function, workers: int):
    with sample_reader(function, workers=workers) as read:
        return read()


def broken(kind: str):
    if kind == "exit":
        raise SystemExit(3)
    raise {"value": ValueError, "memory": MemoryError}[kind]("the fault")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_the_same_with_and_without_a_worker(workers):
    with pytest.raises(BadInput) as caught:
        read_once(
            lambda: theirs(Task(), "train_set", lambda: broken("value")),
            workers=workers,
        )
    line = broken.__code__.co_firstlineno + 3
    assert str(caught.value).endswith(
        f"Task.train_set failed: ValueError: the fault ({__file__}:{line})"
    )
    with pytest.raises(MemoryError, match="the fault"):
        read_once(lambda: theirs(Task(), "train_set", lambda: broken("memory")), workers=workers)
    if workers:
        with pytest.raises(RuntimeError, match="exited"):
            read_once(lambda: broken("exit"), workers=workers)
        with pytest.raises(CannotSend, match="lock"):
            read_once(threading.Lock, workers=workers)


def test_a_reader_keeps_its_state_and_the_process_that_starts_it_has_none():
    calls = []

    def counted(number: int) -> int:
        calls.append(number)
        return len(calls)

    with sample_reader(counted, workers=2) as read:
        assert [read(5), read(6)] == [1, 2]
    assert calls == []


def test_a_view_is_sent_without_the_tensor_behind_it():
    whole = torch.arange(100_000.0).reshape(1000, 100)
    sent = _pickled({"row": whole[7], "column": whole[:, 3], "wide": whole[0, :1].expand(50)})
    assert len(sent) < 10_000
    found = pickle.loads(sent)
    assert torch.equal(found["row"], whole[7]) and torch.equal(found["column"], whole[:, 3])
    assert torch.equal(found["wide"], torch.zeros(50))
