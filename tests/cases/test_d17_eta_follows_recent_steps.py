"""D17: the remaining time comes from this session's recent steps; saves, evaluations and warm-up are not in it."""

from __future__ import annotations

import pytest

from tercet.training.record import Pace


def feed(pace: Pace, seconds: list[float]) -> None:
    for s in seconds:
        pace.add(s)


def test_after_a_resume_it_counts_what_is_left():
    pace = Pace()  # a fresh session at step 60 of 100: nothing of the first 60 steps is in it
    feed(pace, [3.0, 0.5] + [0.02] * 3)  # compilation and allocation first
    low, high = pace.remaining(35)
    assert low == pytest.approx(35 * 0.02)
    assert high == pytest.approx(35 * 0.02)


def test_one_slow_step_moves_it_little():
    pace = Pace()
    feed(pace, [0.02] * 30)
    before = pace.remaining(100)[0]
    pace.add(1.0)
    assert pace.remaining(99)[0] == pytest.approx(before, rel=0.25)


def test_at_first_it_is_a_range():
    pace = Pace()
    assert pace.remaining(10) is None
    feed(pace, [9.0, 9.0, 0.01, 0.03])
    assert pace.remaining(10) == pytest.approx((0.1, 0.3))
