"""The order over row groups that are read whole: each sample once per epoch, few open groups, lanes
for ranks."""

from __future__ import annotations

import numpy as np
import pytest

from oneloop.tasks.rows.row_group_order import Windows

pytestmark = pytest.mark.covers("oneloop.tasks.rows.row_group_order")

CASES = [
    ([5, 3, 9, 1], 2, 4),
    ([7], 1, 3),
    ([0, 5, 0, 4], 2, 4),
    ([50] * 40, 16, 32),
    ([1, 200, 3, 70] * 30, 24, 24),
]


@pytest.mark.parametrize(("sizes", "held", "batch"), CASES)
def test_every_epoch_is_a_new_permutation_found_at_any_position(sizes, held, batch):
    order = Windows(sizes, seed=1, open_groups=held, batch=batch)
    epochs, whole = order[0 : 4 * order.size]
    for epoch in range(4):
        here = slice(epoch * order.size, (epoch + 1) * order.size)
        assert (epochs[here] == epoch).all() and sorted(whole[here].tolist()) == list(
            range(order.size)
        )
    for start in range(0, 4 * order.size - 13, 1 + order.size // 7):
        # a new object, without state of earlier calls
        again = Windows(sizes, seed=1, open_groups=held, batch=batch)
        assert again[start : start + 13][1].tolist() == whole[start : start + 13].tolist()
    if order.size > 9:
        assert whole[: order.size].tolist() != whole[order.size : 2 * order.size].tolist()
        assert (
            whole.tolist()
            != Windows(sizes, seed=2, open_groups=held, batch=batch)[0 : 4 * order.size][1].tolist()
        )


def test_the_order_is_a_golden_value():
    # A change here would change every resumed run.
    assert Windows([5, 3, 9, 1], seed=0, open_groups=2, batch=4)[0:20][1].tolist() == GOLDEN


GOLDEN = [13, 11, 14, 12, 17, 16, 9, 15, 10, 8, 1, 3, 7, 4, 2, 0, 5, 6, 7, 5]


def test_few_groups_are_open_at_a_time():
    rows, groups, held = 100, 200, 32
    order = Windows([rows] * groups, seed=0, open_groups=held, batch=64)
    assert (order.lanes, order.window) == (4, 8)
    indices = order[0 : order.size][1] // rows
    # each lane has 200 of these, a quarter of a window
    for start in range(0, order.size - 800, 800):
        assert len(set(indices[start : start + 800].tolist())) <= 2 * held
    left = []  # a group is not reopened, except those that two lanes share
    for group in range(groups):
        places = np.flatnonzero(indices == group)
        left.append(places[-1] - places[0] < 2 * held * rows)
    assert left.count(False) < order.lanes


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_reads_only_its_own_lanes(ranks):
    rows, groups, batch = 100, 208, 64
    order = Windows([rows] * groups, seed=0, open_groups=64, batch=batch)
    assert order.lanes == 8
    share = batch // ranks
    for epoch in range(3):  # epochs begin within steps
        steps = np.arange(epoch * order.size // batch + 1, (epoch + 1) * order.size // batch)
        for rank in range(ranks):
            positions = steps[:, None] * batch + rank * share + np.arange(share)[None, :]
            read = len(np.unique(order.at(positions)[1] // rows))
            assert read <= groups / ranks + order.lanes


@pytest.mark.parametrize("held", [1, 2, 4, 8, 16, 200])
def test_shuffling_quality_by_window(held):
    """The mean distance of neighbours, relative to a full permutation, grows with the number of
    open groups."""
    rows, groups = 500, 200
    order = Windows([rows] * groups, seed=0, open_groups=held, batch=1)
    distance = np.abs(np.diff(order[0 : order.size][1])).mean() / (order.size / 3)
    expected = 1.0 if held == groups else 1 - 1 / held
    assert distance == pytest.approx(expected, abs=0.04)


def test_what_is_no_order_is_rejected():
    for sizes, held in (([], 2), ([0, 0], 2), ([3], 0)):
        with pytest.raises(ValueError, match="requires samples and open groups"):
            Windows(sizes, seed=0, open_groups=held, batch=1)
