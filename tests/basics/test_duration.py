from __future__ import annotations

import pytest

from oneloop.basics.duration import Duration, Scale, is_time
from oneloop.basics.exit_codes import BadInput
from oneloop.recipe.parse import recipe

pytestmark = pytest.mark.covers("oneloop.basics.duration")

SCALE = Scale(batch=64, epoch=1000, sample_tokens=128)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (500, 500),
        ("500", 500),
        ("500 steps", 500),
        ("20ep", 313),
        ("1 epoch", 16),
        ("1M samples", 15625),
        ("65 samples", 2),
        ("2M tokens", 245),
        ("1.5K samples", 24),
        ("10%", 25),
        ("0", 0),
        ("1e3 samples", 16),
    ],
)
def test_durations_become_whole_steps_rounded_up(text, steps):
    assert Duration(text).steps(SCALE, total=250) == steps


@pytest.mark.parametrize("text", ["-5", "five", "5 parsecs", "", "5 %%", "1M", "nan"])
def test_what_is_no_duration_is_rejected(text):
    if text == "1M":
        assert Duration(text).steps(SCALE) == 10**6
        return
    with pytest.raises(ValueError, match="is not a duration"):
        Duration(text)


def test_a_share_needs_a_whole_and_tokens_need_equal_samples():
    with pytest.raises(ValueError, match="share of the run"):
        Duration("10%").steps(SCALE)
    with pytest.raises(ValueError, match="samples differ in length"):
        Duration("1M tokens").steps(Scale(64, 1000))


def test_is_time_at_every_nth_step_and_the_last():
    assert [step for step in range(1, 12) if is_time(step, 4, 11)] == [4, 8, 11]
    assert [step for step in range(1, 12) if is_time(step, 0, 11)] == [11]


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("20min", 1200), ("3.5h", 12600), ("2d", 172800)]
)
def test_a_time_is_for_saves_only(text, expected):
    assert (Duration(text).amount, Duration(text).unit) == (expected, "seconds")
    assert recipe("digits", save={"every": text}).save.every == Duration(text)
    with pytest.raises(
        ValueError,
        match=f"eval.every '{text}' is a time, which only save.every and stop.after accept",
    ):
        Duration(text).steps(SCALE, key="eval.every")
    with pytest.raises(BadInput, match=r"stop.after '5x' is not a time"):
        recipe("digits", stop={"after": "5x"})
