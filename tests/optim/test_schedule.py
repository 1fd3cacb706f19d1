"""Learning rates follow their formulas, and fall like torch's when a metric stops improving."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from oneloop.basics.duration import Duration, Scale
from oneloop.loop.counters import Best, Counters
from oneloop.optim import schedule
from oneloop.optim.schedule import learning_rate

pytestmark = pytest.mark.covers(
    "oneloop.loop.counters",
    "oneloop.optim.schedule",
)

SCALE = Scale(batch=10, epoch=100)


def rates(factor, total=100, warmup="10", final=0.0, **options):
    rate = learning_rate(
        factor, 2.0, warmup=Duration(warmup), final=final, options=options, scale=SCALE, total=total
    )
    return [rate(step) for step in range(total)]


def test_warm_up_rises_in_a_straight_line():
    assert rates(schedule.constant)[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert set(rates(schedule.constant)[10:]) == {2.0}
    assert rates(schedule.constant, warmup="2ep")[:20] == pytest.approx(
        [0.1 * n for n in range(1, 21)]
    )


def test_schedules_follow_their_formulas():
    assert rates(schedule.linear, final=0.1)[55] == pytest.approx(2 * (1 - 0.9 * 45 / 90))
    assert rates(schedule.cosine)[55] == pytest.approx(1 + math.cos(math.pi * 45 / 90))
    stable = rates(schedule.wsd, decay=Duration("20%"), final=0.5)
    assert stable[10:80] == [2.0] * 70
    assert stable[90] == pytest.approx(2 * (1 - 0.5 * 10 / 20))


def test_a_function_of_ones_own():
    assert rates(lambda step, total: step / total, warmup="0")[25] == 0.5
    with pytest.raises(ValueError, match="warmup 200 is 200 steps"):
        rates(schedule.constant, warmup="200")


def test_plateau_steps_down_like_torchs():
    rate = learning_rate(
        schedule.plateau,
        1.0,
        warmup=Duration(0),
        final=0.0,
        options={"factor": 0.5, "patience": 2},
        scale=SCALE,
        total=100,
    )
    parameter = nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        theirs, factor=0.5, patience=1, threshold=0.0
    )
    count, best = Counters(), Best()
    for step, loss in enumerate([5.0, 4.0, 4.5, 4.4, 4.3, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4]):
        count.evaluated(best.update(loss, step), patience=rate.patience)
        reference.step(loss)
        assert rate(step, reductions=count.reductions) == pytest.approx(
            theirs.param_groups[0]["lr"]
        )


def test_best_never_takes_nan():
    best = Best(upward=True)
    assert best.update(1.0, 1)
    assert not best.update(math.nan, 2)
    assert not best.update(0.5, 3)
    assert (best.value, best.step, best.since) == (1.0, 1, 2)
