"""The global order: one permutation per epoch, the same for any number of ranks, indexed in
O(1)."""

from __future__ import annotations

import time

import numpy as np
import pytest

from oneloop.basics.seeds import key
from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order

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
    for start in (0, 999_000, 123 * size):
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
