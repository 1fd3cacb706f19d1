"""The global order: one permutation per epoch, the same for any number of ranks, indexed in
O(1)."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oneloop.basics.seeds import key
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order, Ordered, StoredOrder, checked_order, order_hash, order_of
from splits import BATCH, distance, expected, furthest, trained
from worlds import run, train

pytestmark = pytest.mark.covers(
    "oneloop.data.batch_layout",
    "oneloop.data.order",
)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 37, 1797, 4096, 100_003])
def test_every_epoch_is_a_new_permutation(size):
    order = Order(size, seed=3)
    seen = []
    for epoch in range(3):
        epochs, indices = order[epoch * size : (epoch + 1) * size]
        assert (epochs == epoch).all()
        assert sorted(indices.tolist()) == list(range(size))
        seen.append(indices.tolist())
    if size > 9:
        assert seen[0] != seen[1] != seen[2]
        assert seen[0] != Order(size, seed=4)[0:size][1].tolist()


def test_the_order_is_a_golden_value():
    # A change here would change every resumed run.
    assert Order(10, seed=0)[0:12][1].tolist() == GOLDEN
    assert key(1, 2, 3) == GOLDEN_KEY


GOLDEN = [5, 3, 6, 4, 9, 8, 1, 7, 2, 0, 7, 5]
GOLDEN_KEY = 2623250113353451629


@pytest.mark.parametrize("size", [7, 16, 100])
def test_every_place_gets_every_sample_equally_often(size):
    epochs = 20_000
    order = Order(size, seed=0)
    table = np.zeros((size, size))
    chunk = order[0 : epochs * size][1].reshape(epochs, size)
    for place in range(size):
        table[place] = np.bincount(chunk[:, place], minlength=size)
    mean = epochs / size
    chi_square = ((table - mean) ** 2 / mean).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)  # six standard deviations
    # and neighbours are independent: every next sample is equally frequent
    pairs = np.zeros((size, size))
    np.add.at(pairs, (chunk[:, :-1].ravel(), chunk[:, 1:].ravel()), 1)
    off = pairs[~np.eye(size, dtype=bool)]
    assert abs(((off - off.mean()) ** 2 / off.mean()).sum() - off.size) < 8 * np.sqrt(2 * off.size)


def test_the_samples_of_a_step_are_the_same_for_1_2_4_and_4096_ranks():
    order = Order(1_000_003, seed=1)
    size = 8192
    for start in (999_000, 123 * size):  # across the end of an epoch, and inside one
        expected = sorted(order[start : start + size][1].tolist())
        for ranks in (1, 2, 4, 4096):
            share = BatchLayout(size, ranks).each
            parts = [
                order[start + rank * share : start + (rank + 1) * share][1] for rank in range(ranks)
            ]
            assert sorted(np.concatenate(parts).tolist()) == expected


def test_a_slice_costs_the_same_at_any_position():
    order = Order(10**9, seed=0)

    def cost(start: int) -> float:
        times = []
        for turn in range(50):
            began = time.perf_counter()
            order[start + turn : start + turn + 256]
            times.append(time.perf_counter() - began)
        return float(np.median(times))

    cost(0)
    assert cost(10**12) < 10 * cost(0)  # O(position) would take a billion times as long


def test_an_order_rejects_nonsense():
    with pytest.raises(ValueError, match="at least one sample"):
        Order(0, seed=0)
    with pytest.raises(ValueError, match="start:stop"):
        Order(3, seed=0)[:5]


def test_keys_differ_in_every_number():
    keys = {key(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(keys) == 8000
    assert all(0 <= one < 2**63 for one in keys)


def test_a_stored_order_repeats_the_samples_as_they_are():
    epochs, indices = StoredOrder(5)[3:12]
    assert epochs.tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2]
    assert indices.tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    with pytest.raises(ValueError, match="at least one sample"):
        StoredOrder(0)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "single"),
        pytest.param(2, "ddp", marks=pytest.mark.slow),
        pytest.param(2, "fsdp2", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_shuffling_is_a_plain_loop_over_the_samples(tmp_path, ranks, strategy):
    weights, losses, ids = trained(
        tmp_path / "a",
        ranks=ranks,
        accumulate=2,
        strategy=strategy,
        steps=10,
        extra=("--data.shuffle", "false"),
    )
    # 37 samples, of which a loader without shuffling takes 16 at a time, epoch after epoch.
    drawn = [index for step in ids for index in step]
    assert drawn == [position % 37 for position in range(10 * BATCH)]
    plain, plain_losses = expected(ids, dtype=torch.float32, optimizer="adamw")
    assert distance(weights, plain) < 1e-6 and furthest(losses, plain_losses) < 1e-6


def rows_of(folder, first: int, count: int) -> list[dict]:
    return [{"text": f"text {number}", "value": number} for number in range(first, first + count)]


@pytest.fixture
def files(tmp_path):
    """Two row groups of Parquet, and a file of JSON lines."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(rows_of(tmp_path, 0, 30))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=8)
    lines = [json.dumps(row) for row in rows_of(tmp_path, 100, 10)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    return tmp_path


def values(dataset, *, count: int) -> list[int]:
    """Return the numbers of the first samples in the stored order."""
    order = order_of(dataset, seed=0, batch=4, shuffle=False)
    return [int(dataset[index]["value"]) for index in order[0:count][1].tolist()]


def test_row_groups_and_mixtures_keep_the_order_of_their_files(files):
    from oneloop.tasks.rows.mixture import Mixture
    from oneloop.tasks.rows.parquet import Parquet
    from oneloop.tasks.rows.parquet_files import LocalFile
    from oneloop.tasks.rows.rows import Mapped

    file = LocalFile(files / "a.parquet", files)
    groups = Parquet([file], files, ["text", "value"], window=1, content={})
    assert values(Mapped(groups, dict), count=35) == [*range(30), *range(5)]
    lines = [json.loads(line) for line in (files / "b.jsonl").read_text().splitlines()]
    mixture = Mixture({"a": groups, "b": lines}, [0.75, 0.25])
    mixed = values(Mapped(mixture, dict), count=48)
    assert [value for value in mixed if value < 100] == [*range(30), *range(6)]
    assert [value for value in mixed if value >= 100] == [*range(100, 110), 100, 101]
    assert sum(value >= 100 for value in mixed[:8]) == 2  # in every prefix, as with shuffling


@pytest.mark.parametrize("pack", ["concat", "packed", "padded"])
def test_texts_keep_the_order_of_their_files(tmp_path, pack):
    from oneloop.tasks.causal_lm import CausalLM

    texts = [{"text": f"text {number} " * (1 + number % 5)} for number in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(text) for text in texts))
    samples = CausalLM(str(tmp_path / "a.jsonl"), block=64, pack=pack).train_set()
    order = order_of(samples, seed=0, batch=4, shuffle=False)
    assert order[0 : len(samples) + 2][1].tolist() == [*range(len(samples)), 0, 1]


OWN_ORDER = """
import torch
from oneloop.data.order import Order
from tiny import Ragged, Sequences

class Samples(Sequences):
    def order(self, *, seed, batch):
        return Order(len(self), seed=seed)

class Task(Ragged):
    def train_set(self):
        return Samples(37, seed=1)
"""


def test_an_order_of_the_data_set_is_not_ignored(tmp_path):
    (tmp_path / "own.py").write_text(OWN_ORDER)
    words = ["own.py:Task", "--duration", "2", "--batch.size", "8", "--run.dir", "a"]
    words += ["--schedule.name", "constant"]
    world = run(train, [*words, "--data.shuffle", "false"], folder=tmp_path)
    assert world.codes == [2] and "the order that Samples.order defines" in world.output
    assert not (tmp_path / "a").exists()

    # The order is part of what is trained.
    run(train, words, folder=tmp_path).ok()
    (tmp_path / "own.py").write_text(OWN_ORDER.replace("seed=seed)", "seed=seed + batch)"))
    world = run(train, [*words, "--duration", "3"], folder=tmp_path)
    assert world.codes == [2] and "let order() depend on its arguments only" in world.output
    (tmp_path / "own.py").write_text(OWN_ORDER.replace("def order(self", "def other(self"))
    world = run(train, [*words, "--data.shuffle", "false"], folder=tmp_path)
    assert world.codes == [2] and "data.shuffle: True -> False" in world.output


class Rows(list):
    """A data set whose order is given."""

    def __init__(self, order: Callable[..., Any]) -> None:
        super().__init__(range(61))
        self.order = order


class Listed(Ordered):
    def __init__(self, indices: np.ndarray) -> None:
        self.indices = indices

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return positions // 61, self.indices[positions % 61]


class Stateful(Listed):
    """Each call moves it."""

    def at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.indices = np.roll(self.indices, 1)
        return super().at(positions)


@pytest.mark.parametrize(
    "order",
    [
        lambda seed, batch: Listed(np.random.default_rng().permutation(61)),
        lambda seed, batch: Order(61, seed=next(NUMBERS)),
        lambda seed, batch: Stateful(np.arange(61)),
    ],
)
def test_an_order_that_is_no_function_of_its_arguments_is_rejected(order):
    with pytest.raises(ValueError, match=r"Rows.order\(\) returned two orders for the same"):
        checked_order(Rows(order), seed=0, batch=12)


NUMBERS = itertools.count()


def test_an_order_of_its_arguments_is_kept():
    def order(seed: int, batch: int) -> Ordered:
        return Listed(np.random.default_rng(seed).permutation(61))

    made = checked_order(Rows(order), seed=3, batch=12)
    assert made[0:61][1].tolist() == np.random.default_rng(3).permutation(61).tolist()
    assert order_hash(made, 61, 12) == order_hash(made, 61, 12, backwards=True)
    assert order_hash(made, 61, 12) != order_hash(made, 61, 12, position=36)
