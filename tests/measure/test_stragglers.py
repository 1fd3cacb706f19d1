"""Ranks that slow down all others: measured alone, and reported with their host."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
import torch

from oneloop.measure.stragglers import Stragglers, product_seconds
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.loop.upkeep",
    "oneloop.measure.stragglers",
)

TASK = '''
import os, time, torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

class Slow(TorchDispatchMode):
    """A device on which every operation takes 1.5 times as long."""
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = time.perf_counter()
        found = func(*args, **(kwargs or {}))
        until = time.perf_counter() + 0.5 * (time.perf_counter() - began)
        while time.perf_counter() < until:
            pass
        return found

class Rows(torch.utils.data.Dataset):
    def __init__(self, wait):
        self.wait = wait
    def __len__(self):
        return 512
    def __getitem__(self, index):
        if self.wait and os.environ["RANK"] == "1":
            time.sleep(self.wait)
        return torch.full((256,), index / 512), index % 2

class Task:
    def __init__(self, slow: str = "none", wait: float = 0.0):
        self.slow, self.wait = slow, wait
    def model(self):
        if self.slow != "none" and os.environ["RANK"] == self.slow:
            Slow().__enter__()
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))
    def train_set(self):
        return Rows(self.wait)
    def eval_sets(self):
        return {}
    def collate(self, samples):
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.tensor([y for _, y in samples])}
    def weight(self, batch):
        return torch.tensor(float(len(batch["y"])))
    def loss(self, model, batch):
        found = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
        return found, {}
'''  # noqa: E501


def _events(
    folder: Path, config: str, *keys: str, seconds: int = 60, until: bool = True
) -> list[dict]:
    """Train until a straggler is reported (``until``), at most for these seconds; return the
    reports."""
    (folder / "task.py").write_text(TASK)
    words = [
        f"{folder / 'task.py'}:Task",
        "--duration",
        "1000000",
        "--batch.size",
        "64",
        "--log.every",
        "2",
        *keys,
    ]
    words += [
        "--stop.after",
        f"{seconds}s",
        "--save.every",
        "0",
        "--eval.every",
        "0",
        "--run.dir",
        str(folder / "run"),
    ]
    log = folder / "run" / "metrics.jsonl"

    def reports() -> list[dict]:
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if '"straggler"' in line and line.endswith("}")]

    def stop_after_a_report() -> None:
        while not ended.wait(0.1):
            if reports():
                (folder / "run" / "STOP").touch()
                return

    ended = threading.Event()
    watcher = threading.Thread(target=stop_after_a_report)
    if until:
        watcher.start()
    try:
        run(train, words, ranks=2, config=config, folder=folder, timeout=seconds + 60.0)
    finally:
        ended.set()
    return reports()


@pytest.mark.parametrize("config", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_a_rank_whose_device_is_1_5_times_slower_is_reported_with_its_host(config, tmp_path):
    events = _events(tmp_path, config, "--task.slow", "1")
    assert any(
        "rank 1 on " + socket.gethostname() in event["why"] and "device" in event["why"]
        for event in events
    )
    assert (
        "slows down all ranks: its device takes" in (tmp_path / "run" / "report.html").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_equal_ranks_are_not_reported(config, tmp_path):
    assert _events(tmp_path, config, seconds=15, until=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("config", ["ddp", "fsdp2"])
def test_a_rank_that_waits_for_data_is_reported(config, tmp_path):
    events = _events(tmp_path, config, "--task.wait", "0.001")
    assert [
        ("rank 1 on " in event["why"], "wait for data" in event["why"]) for event in events
    ] == [(True, True)]


def _judged(times: list[list[tuple[float, float]]], *, step: float = 0.1) -> list[list[str]]:
    """Return the ranks reported after each log; the logs are two seconds apart."""
    judge, now = Stragglers([f"host{rank}" for rank in range(len(times[0]))]), 0.0
    found = []
    for log in times:
        now += 2.0
        sentences = [*judge.judge(log, step_seconds=step, now=now)]
        found.append([sentence.partition(" slows")[0] for sentence in sentences])
    return found


def test_three_times_in_a_row_and_once():
    slow, equal = [(0.0, 1.0), (0.0, 1.34), (0.0, 1.0)], [(0.0, 1.0)] * 3
    one = ["rank 1 on host1"]
    assert _judged([slow] * 5) == [[], [], one, [], []]
    assert _judged([slow, slow, equal, slow, slow, slow]) == [[], [], [], [], [], one]
    assert _judged([[(0.0, 1.0), (0.0, 1.32), (0.0, 1.0)]] * 5) == [[]] * 5
    of_two = [[(0.0, 1.34), (0.0, 1.0)]] * 3
    assert _judged(of_two) == [[], [], ["rank 0 on host0"]]


def test_a_wait_for_data_counts_by_the_step_that_it_makes_longer():
    late = [(0.04, 1.0), (0.01, 1.0), (0.01, 1.0)]  # 0.03 s of a step of 0.1 s: 1.43x
    assert _judged([late] * 3) == [[], [], ["rank 0 on host0"]]
    assert _judged([late] * 3, step=0.2) == [[]] * 3  # 1.18x
    assert _judged([[(0.09, 1.0)] * 3] * 3) == [[]] * 3  # all wait: no straggler, but slow data


def test_log_steps_within_a_second_count_once():
    judge = Stragglers(["a", "b"])
    slow = [(0.0, 1.0), (0.0, 3.0)]
    judged = [[*judge.judge(slow, step_seconds=0.1, now=log / 30)] for log in range(60)]
    assert judged == [[]] * 60  # two times in two seconds


def test_a_rank_measures_a_product():
    assert 0 < product_seconds(torch.device("cpu")) < 1
