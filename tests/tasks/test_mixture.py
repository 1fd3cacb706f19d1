"""Several data sets in proportion: exact to one sample in every prefix, on any number of ranks,
without state."""

from __future__ import annotations

import random

import numpy as np
import pytest

from oneloop.tasks.rows.mixture import Mixture, proportions
from oneloop.tasks.rows.row_group_order import Windows

pytestmark = pytest.mark.covers("oneloop.tasks.rows.mixture")


def mixture(weights=(0.7, 0.2, 0.1)) -> Mixture:
    return Mixture({"a": range(1000), "b": range(300), "c": range(7)}, weights)


@pytest.mark.parametrize(
    "weights", [(0.7, 0.2, 0.1), (1, 1, 1), (0.333, 0.333, 0.334), (5, 3, 0.5), (0.9999, 0.0001, 1)]
)
def test_counts_are_within_one_sample_of_exact_at_every_prefix(weights):
    made = mixture(weights)
    order, draw = made.order(seed=3, batch=8), random.Random(0)
    indices = order[0:60_000][1]
    which = np.searchsorted(made.bounds, indices, side="right") - 1
    counts = np.cumsum(which[:, None] == np.arange(3)[None, :], axis=0)
    for prefix in [1, 2, 3, *(draw.randrange(1, 60_000) for _ in range(100))]:
        exact = prefix * np.array(weights) / sum(weights)
        assert (np.abs(counts[prefix - 1] - exact) < 1).all()


def test_each_set_goes_through_its_own_epochs():
    made = mixture()
    epochs, indices = made.order(seed=3, batch=8)[0:20_000]
    for number, size in enumerate((1000, 300, 7)):
        mine = (indices >= made.bounds[number]) & (indices < made.bounds[number + 1])
        own, its_epochs = indices[mine] - made.bounds[number], epochs[mine]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
            assert (its_epochs[epoch * size : (epoch + 1) * size] == epoch).all()
    assert [made[i] for i in made.bounds[:-1]] == [0, 0, 0] and made[1299] == 299


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_step_is_the_same_at_any_world_from_anywhere(ranks):
    whole = mixture().order(seed=1, batch=32)[0 : 32 * 200][1]
    draw = random.Random(ranks)
    for step in draw.sample(range(200), 20):
        order, share = mixture().order(seed=1, batch=32), 32 // ranks
        parts = [
            order[step * 32 + rank * share : step * 32 + (rank + 1) * share][1]
            for rank in range(ranks)
        ]
        assert np.concatenate(parts).tolist() == whole[step * 32 : (step + 1) * 32].tolist()


def test_sets_with_an_order_of_their_own_keep_it():
    from oneloop.data.order import Order

    class Backwards:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return index

        def order(self, *, seed, batch):
            class Reversed(Order):
                def at(self, positions):
                    return positions // 5, 4 - positions % 5

            return Reversed(5, seed=seed)

    made = Mixture({"a": Backwards(), "b": range(3)}, [1, 1])
    indices = made.order(seed=0, batch=2)[0:20][1]
    assert [i for i in indices.tolist() if i < 5] == [4, 3, 2, 1, 0, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    ("weights", "expected_text"),
    [
        ((-0.1, 1, 1), "the weights of a mixture are -0.1, 1, 1; expected numbers above 0"),
        ((0, 0, 0), "the weights of a mixture are 0, 0, 0"),
        ((float("nan"), 1, 1), "the weights of a mixture are nan, 1, 1"),
        ((0.123456789, 1, 1), "round them to four digits"),
    ],
)
def test_weights_that_say_nothing_are_rejected(weights, expected_text):
    with pytest.raises(ValueError, match=expected_text):
        mixture(weights)


def test_an_empty_set_is_rejected():
    with pytest.raises(ValueError, match="the set 'b' of a mixture is empty; remove it"):
        Mixture({"a": range(3), "b": range(0)}, [1, 1])


def test_a_set_of_weight_0_never_comes():
    assert set(proportions([0, 1, 2]).tolist()) == {1, 2}


class Groups:
    """Samples in 100 row groups of 50, of which 40 are open."""

    def __len__(self) -> int:
        return 5000

    def order(self, *, seed: int, batch: int) -> Windows:
        return Windows([50] * 100, seed=seed, open_groups=40, batch=batch)


@pytest.mark.parametrize(
    ("weights", "batch", "lanes"),
    [([0.7, 0.3], 64, (4, 4)), ([0.5, 0.5], 48, (4, 4)), ([0.97, 0.03], 32, (4, 1))],
)
def test_a_rank_reads_only_its_lanes_of_each_set(weights, batch, lanes):
    mixture = Mixture({"a": Groups(), "b": Groups()}, weights)
    order = mixture.order(seed=0, batch=batch)
    assert tuple(of_set.lanes for of_set in order.orders) == lanes
    steps = int(3 * 5000 / (batch * min(weights)))  # three epochs of the smaller set
    epochs, indices = order.at(np.arange(steps * batch))
    assert (order.at(np.arange(777, 999))[1] == indices[777:999]).all()

    for number, share in enumerate(weights):
        of_set = indices // 5000 == number
        assert np.count_nonzero(of_set) == pytest.approx(share * steps * batch, abs=1)
        # each epoch is a permutation
        for epoch in range(2):
            there = np.sort(indices[of_set & (epochs == epoch)])
            assert (there == np.arange(5000) + number * 5000).all()
            # each of two ranks reads half of the groups, and those that lanes share
            reads = []
            for rank in range(2):
                own = np.arange(steps * batch) % batch // (batch // 2) == rank
                own &= of_set & (epochs == epoch)
                reads.append(len(np.unique(indices[own] // 50)))
            if lanes[number] == 1:
                assert reads == [100, 100]
            else:
                assert max(reads) <= 60 and sum(reads) <= 100 + lanes[number]


def test_a_mixture_whose_cycle_meets_the_steps_too_late_has_one_lane():
    mixture = Mixture({"a": Groups(), "b": Groups()}, [0.49999, 0.50001])
    assert [of_set.lanes for of_set in mixture.order(seed=0, batch=63).orders] == [1, 1]
