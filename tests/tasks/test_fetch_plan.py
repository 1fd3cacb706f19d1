"""The row groups that a rank needs next, against a plain loop over the order of samples."""

from __future__ import annotations

import numpy as np
import pytest

from oneloop.data.batch_layout import BatchLayout
from oneloop.data.order import Order, StoredOrder
from oneloop.tasks.augmentation import RepeatedOrder
from oneloop.tasks.rows.mixture import Mixed, proportions
from oneloop.tasks.rows.remote import fetch_plan
from oneloop.tasks.rows.remote.fetch_plan import NeededGroups
from oneloop.tasks.rows.row_group_order import Windows

pytestmark = pytest.mark.covers("oneloop.tasks.rows.remote.fetch_plan", "oneloop.data.batch_layout")

ROWS = np.random.default_rng(0).integers(1, 40, 90)  # rows of each group
ROWS[7] = 0  # no row of this group was selected
SIZES = 10 * ROWS + 5
FIRSTS = np.cumsum([0, *ROWS])
GROUP_OF = [group for group, rows in enumerate(ROWS) for _ in range(rows)]  # of each row


def windows(batch: int) -> Windows:
    return Windows(ROWS, seed=3, open_groups=16, batch=batch)


def mixed(batch: int) -> Mixed:
    """Return a mixture in which the set of these groups is the second one, and rarer."""
    return Mixed([Order(100, seed=1), windows(batch)], np.array([0, 100]), proportions([0.8, 0.2]))


ORDERS = {
    "windows": windows,
    "mixture": mixed,
    "repeated": lambda batch: RepeatedOrder(windows(batch // 2), 2, batch=batch),
    "all": lambda batch: Order(int(ROWS.sum()), seed=5),
    "stored": lambda batch: StoredOrder(int(ROWS.sum())),
}


def used_groups(order, layout, rank, start, step, offset) -> list[int]:
    """Return the groups of a rank's samples in a step, sample by sample."""
    groups = []
    for micro in range(layout.accumulate):
        begin = start + step * layout.size + layout.leaf(rank, micro) * layout.each
        _, indices = order.at(np.arange(begin, begin + layout.each))
        for row in (indices - offset).tolist():
            if 0 <= row < FIRSTS[-1]:
                groups.append(GROUP_OF[row])
    return groups


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(("ranks", "grain"), [(1, None), (2, None), (4, 4)])
@pytest.mark.parametrize("start", [0, 1000])  # an epoch has 1,748 rows: it ends within a step
def test_what_is_needed_is_what_a_plain_loop_uses(name, ranks, grain, start, monkeypatch):
    monkeypatch.setattr(fetch_plan, "_POSITIONS", 64)
    layout = BatchLayout(16, ranks, grain=grain, sharded=True)
    order = ORDERS[name](layout.size)
    offset = 100 if name == "mixture" else 0
    budget = int(SIZES.sum()) // 4
    steps = 40
    for rank in range(ranks):
        needed = NeededGroups(
            order,
            layout,
            rank=rank,
            start=start,
            firsts=FIRSTS + offset,
            sizes=SIZES,
            budget=budget,
        )
        uses = [used_groups(order, layout, rank, start, step, offset) for step in range(2 * steps)]
        for step in range(steps):
            now = needed.advance(step)

            # All of this step's groups are there, and groups come in the order of their use.
            assert now.keys() >= set(uses[step])
            assert list(now.values()) == sorted(now.values())
            for group, use in now.items():
                # A use that has begun is not over. One that comes is the first one.
                if use >= step and use < len(uses):
                    assert group in uses[use]
                    assert not any(group in uses[other] for other in range(step, use))
                elif use < step and name != "mixture":
                    assert any(group in later for later in uses[step:])

            # They fill the budget, which only the current step may exceed.
            held = sum(int(SIZES[group]) for group in now)
            of_step = sum(int(SIZES[group]) for group in set(uses[step]))
            assert held <= max(budget, of_step)
            assert needed.complete(step) or name == "mixture"

            # The first step that is not covered needs more than what is left.
            open_step = next(
                (at for at in range(step, len(uses)) if not now.keys() >= set(uses[at])), None
            )
            if open_step is not None and needed.complete(step) and name != "mixture":
                further = sum(int(SIZES[group]) for group in set(uses[open_step]) - now.keys())
                assert held + further > budget


def test_a_step_that_skips_others_drops_what_they_used():
    layout = BatchLayout(16, 1)
    sizes = np.ones(len(ROWS), dtype=np.int64)
    needed = NeededGroups(
        StoredOrder(int(ROWS.sum())),
        layout,
        rank=0,
        start=0,
        firsts=FIRSTS,
        sizes=sizes,
        budget=3,
    )
    assert list(needed.advance(0))[:3] == [0, 1, 2]
    last = int(FIRSTS[-1]) // layout.size - 1
    assert not {1, 2} & needed.advance(last).keys()  # the next epoch needs the first one
