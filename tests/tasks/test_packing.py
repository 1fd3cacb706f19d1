"""Samples of different lengths: packed into bins by best fit decreasing, or ordered in steps of
similar length."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order
from oneloop.tasks.language.packing import Bucketed, packed

pytestmark = pytest.mark.covers(
    "oneloop.data.batch_layout",
    "oneloop.tasks.language.packing",
)


def bins_of(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Return the items of each bin."""
    members, edges = packed(lengths, capacity)
    return [members[start:stop] for start, stop in pairwise(edges)]


def fills(bins: list[np.ndarray], lengths: np.ndarray) -> list[int]:
    return sorted(int(lengths[one].sum()) for one in bins)


def one_by_one(lengths: np.ndarray, capacity: int) -> list[int]:
    """Return the bin fills of textbook best fit decreasing."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        takes = [room for room in rooms if room >= length]
        if takes:
            rooms.remove(min(takes))
        rooms.append((min(takes) if takes else capacity) - length)
    return sorted(capacity - room for room in rooms)


def some_lengths(number: int) -> tuple[np.ndarray, int]:
    draw = np.random.default_rng(number)
    capacity, items = int(draw.integers(1, 120)), int(draw.integers(1, 300))
    longest = int(draw.integers(1, capacity + 1))
    return draw.integers(1, longest + 1, items), capacity


@pytest.mark.parametrize("number", range(60))
def test_bins_are_those_of_best_fit_decreasing(number):
    lengths, capacity = some_lengths(number)
    bins = bins_of(lengths, capacity)
    assert sorted(np.concatenate(bins).tolist()) == list(range(len(lengths)))
    assert max(fills(bins, lengths)) <= capacity
    assert fills(bins, lengths) == one_by_one(lengths, capacity)
    assert (
        all((np.diff(one) > 0).all() for one in bins)
        and (np.diff([one[0] for one in bins]) > 0).all()
    )
    again = bins_of(lengths, capacity)
    assert [one.tolist() for one in again] == [one.tolist() for one in bins]


def test_the_fullest_bin_that_takes_an_item_gets_it():
    # First fit would put the 2 next to the 6, into the bin that was opened first.
    bins = bins_of(np.array([6, 2, 8]), 10)
    assert [one.tolist() for one in bins] == [[0], [1, 2]]


def test_of_equal_lengths_the_first_ones_are_packed_first():
    bins = bins_of(np.array([4, 4, 9, 4, 4, 4]), 12)
    assert [one.tolist() for one in bins] == [[0, 1, 3], [2], [4, 5]]


@pytest.mark.parametrize("pieces", [2, 3, 5, 12])
def test_bins_are_few(pieces):
    # Full bins cut into pieces: the minimum number of bins is known.
    capacity, fewest, draw = 1000, 300, np.random.default_rng(pieces)
    cuts = [
        np.sort(draw.choice(np.arange(1, capacity), pieces - 1, replace=False))
        for _ in range(fewest)
    ]
    lengths = draw.permutation(
        np.concatenate([np.diff(cut, prepend=0, append=capacity) for cut in cuts])
    )
    assert fewest <= len(bins_of(lengths, capacity)) <= 11 / 9 * fewest + 1


def test_a_million_lengths_are_packed_in_seconds():
    lengths = (
        np.random.default_rng(0)
        .lognormal(np.log(300), 0.8, 1_000_000)
        .astype(np.int64)
        .clip(1, 2048)
    )
    began = time.perf_counter()
    bins = bins_of(lengths, 2048)
    assert time.perf_counter() - began < 8  # half a second on an idle machine
    assert lengths.sum() / (len(bins) * 2048) > 0.995


CASES = [
    (1, 1, 50),
    (1, 4, 2),
    (3, 8, 1),
    (7, 1, 3),
    (40, 8, 2),
    (101, 8, 3),
    (1000, 7, 5),
    (333, 16, 50),
    (12, 5, 1),
]
"""samples, batch, window"""


def log_normal(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(np.log(300), 0.8, size).astype(np.int64) + 1


@pytest.mark.parametrize(("size", "batch", "window"), CASES)
@pytest.mark.parametrize("equal", [False, True])
def test_every_epoch_is_a_new_permutation_found_at_any_position(size, batch, window, equal):
    lengths = np.full(size, 5) if equal else log_normal(size)
    order = Bucketed(lengths, seed=1, batch=batch, window=window)
    epochs, whole = order[0 : 5 * size]
    for epoch in range(5):
        here = slice(epoch * size, (epoch + 1) * size)
        assert (epochs[here] == epoch).all() and sorted(whole[here].tolist()) == list(range(size))
    for start in range(0, 5 * size - 13, 1 + size // 7):
        # a new object, without state of earlier calls
        again = Bucketed(lengths, seed=1, batch=batch, window=window)
        assert again[start : start + 13][1].tolist() == whole[start : start + 13].tolist()
    anywhere = np.random.default_rng(0).integers(0, 5 * size, (6, 4, 5))
    assert (order.at(anywhere)[0] == epochs[anywhere]).all() and (
        order.at(anywhere)[1] == whole[anywhere]
    ).all()
    assert order[3:3][1].shape == (0,)
    if size > 11:
        assert whole[:size].tolist() != whole[size : 2 * size].tolist()
        assert (
            whole.tolist()
            != Bucketed(lengths, seed=2, batch=batch, window=window)[0 : 5 * size][1].tolist()
        )


def test_the_order_is_a_golden_value():
    # A change here would change every resumed run.
    assert (
        Bucketed([5, 3, 9, 1, 7, 2, 3, 8, 6, 4], seed=0, batch=3, window=2)[0:20][1].tolist()
        == GOLDEN
    )


GOLDEN = [9, 8, 4, 3, 5, 6, 0, 7, 2, 1, 4, 7, 5, 6, 0, 3, 1, 9, 8, 2]


@pytest.mark.parametrize(("size", "batch", "window"), [(1000, 8, 10), (1003, 8, 10), (997, 16, 25)])
def test_the_shares_of_a_window_are_runs_of_its_sorted_samples(size, batch, window):
    lengths = np.random.default_rng(0).permutation(size)  # all lengths differ
    order, plain = Bucketed(lengths, seed=3, batch=batch, window=window), Order(size, seed=3)
    for epoch in range(4):
        begin, end = epoch * size, (epoch + 1) * size
        edges = np.unique([begin, *range(-(-begin // batch) * batch, end, batch), end])
        windows = max(1, (len(edges) - 1) // window)
        bounds = [edges[number * (len(edges) - 1) // windows] for number in range(windows + 1)]
        for first, last in pairwise(bounds):
            # the samples of the permutation, window by window
            ranked = np.sort(lengths[plain[first:last][1]])
            inside = edges[(edges >= first) & (edges <= last)]
            assert window <= len(inside) - 1 < 2 * window
            for start, stop in pairwise(inside):
                share = lengths[order[start:stop][1]]
                place = int(np.searchsorted(ranked, share[0]))
                assert share.tolist() == ranked[place : place + stop - start].tolist()


def test_the_samples_of_a_step_are_the_same_for_any_ranks_and_micro_batches():
    lengths, size = log_normal(10_007), 96
    whole = Bucketed(lengths, seed=1, batch=size)[0 : 300 * size][1].reshape(300, size)
    for ranks, micro in ((1, 96), (2, 8), (4, 24), (96, 1)):
        layout = BatchLayout(size, ranks, micro)
        orders = [Bucketed(lengths, seed=1, batch=size) for _ in range(ranks)]
        for step in (0, 1, 104, 105, 299):  # step 104 crosses an epoch's end
            for rank, order in enumerate(orders):
                for start in range(rank * size // ranks, (rank + 1) * size // ranks, layout.each):
                    positions = slice(step * size + start, step * size + start + layout.each)
                    assert (
                        order[positions][1].tolist()
                        == whole[step, start : start + layout.each].tolist()
                    )


def padding(indices: np.ndarray, lengths: np.ndarray, batch: int) -> float:
    """Return the share of padding, each row padded to the longest row of its batch."""
    rows = lengths[indices].reshape(-1, batch)
    return float(1 - rows.sum() / (rows.max(axis=1).sum() * batch))


@pytest.mark.parametrize("size", [20_000, 20_011])
def test_padding_shrinks_and_short_and_long_steps_are_mixed(size):
    lengths, batch, steps = log_normal(size), 32, 1800
    order = Bucketed(lengths, seed=0, batch=batch)
    indices = order[0 : steps * batch][1]
    plain = padding(Order(size, seed=0)[0 : steps * batch][1], lengths, batch)
    assert padding(indices, lengths, batch) < plain / 3
    # micro-batches are consecutive samples of a step
    assert padding(indices, lengths, 8) < plain / 6
    means = lengths[indices].reshape(steps, batch).mean(axis=1)
    places = np.arange(steps)
    assert abs(np.corrcoef(places, means)[0, 1]) < 4 / np.sqrt(steps)
    assert abs(np.corrcoef(places % 50, means)[0, 1]) < 4 / np.sqrt(steps)
    assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 5 / np.sqrt(steps)


def test_of_equal_lengths_every_place_gets_every_sample_equally_often():
    size, epochs = 12, 600
    chunk = Bucketed([5] * size, seed=0, batch=5)[0 : epochs * size][1].reshape(epochs, size)
    mean = epochs / size
    table = np.array([np.bincount(chunk[:, place], minlength=size) for place in range(size)])
    freedom = (size - 1) ** 2
    assert abs(((table - mean) ** 2 / mean).sum() - freedom) < 6 * np.sqrt(2 * freedom)


def test_an_epoch_begins_and_ends_with_short_and_with_long_samples():
    # Also if it does so within a step, with a smaller share.
    size, epochs, batch = 12, 600, 5
    chunk = Bucketed([*range(size)], seed=0, batch=batch)[0 : epochs * size][1].reshape(
        epochs, size
    )
    for phase in range(batch):
        these = chunk[np.arange(epochs) * size % batch == phase]
        for share in (
            these[:, : batch - phase],
            these[:, size - ((phase + size) % batch or batch) :],
        ):
            means = share.mean(axis=1)
            assert abs(means.mean() - (size - 1) / 2) < 5 * means.std() / np.sqrt(len(means))
            assert means.std() > 1


def test_a_window_costs_the_same_in_an_epoch_of_any_size():
    def cost(size: int) -> float:
        order, times = Bucketed(np.broadcast_to(np.int64(7), size), seed=0, batch=64), []
        for number in range(10):
            began = time.perf_counter()
            order[number * 64 * 100 : number * 64 * 100 + 64]
            times.append(time.perf_counter() - began)
        return float(np.median(times))

    cost(10_000)
    assert cost(10**10) < 10 * cost(10_000)
    order = Bucketed(np.broadcast_to(np.int64(7), 10**10), seed=0, batch=64)
    order[0 : 64 * 1000]
    assert order._window.cache_info().currsize == 2


def test_what_is_no_order_is_rejected():
    with pytest.raises(ValueError, match="start:stop"):
        Bucketed([1], seed=0, batch=4)[:5]
