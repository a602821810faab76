"""Chart geometry: ticks, thinning, smoothing, places."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.report.chart import Series, chart, nice_ticks, smoothed, thin, tick_labels


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e12))
def test_ticks_are_even_and_few_whatever_the_range(low, size):
    high = low + size
    if not high > low + abs(low) * 1e-9:
        return
    ticks = nice_ticks(low, high, 6)
    assert 2 <= len(ticks) <= 14
    gaps = [b - a for a, b in pairwise(ticks)]
    assert min(gaps) > 0
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3, abs=abs(high) * 1e-9)


def test_tick_labels_tell_neighbours_apart():
    assert tick_labels([0, 20000, 40000, 60000]) == ["0", "20 k", "40 k", "60 k"]
    assert tick_labels([2.0, 2.5, 3.0]) == ["2.0", "2.5", "3.0"]
    assert tick_labels([0, 0.0002, 0.0004]) == ["0", "2e-4", "4e-4"]
    assert tick_labels([31000, 31050, 31100]) == ["31.00 k", "31.05 k", "31.10 k"]
    assert tick_labels([0.0005, 0.0010]) == ["5e-4", "1.0e-3"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_ends_and_extremes(values):
    points = [(float(i), v) for i, v in enumerate(values)]
    kept = thin(points, buckets=50)
    assert len(kept) <= 102
    assert kept[0] == points[0] and kept[-1] == points[-1]
    assert max(y for _, y in kept) == max(values)
    assert min(y for _, y in kept) == min(values)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)


def test_smoothing_ignores_a_spike_and_leaves_the_beginning_where_it_is():
    values = [10.0 - 0.01 * i for i in range(400)]
    values[200] = 1000.0
    points = [(float(i), v) for i, v in enumerate(values)]
    middle, window = smoothed(points)
    assert window == 11
    assert middle[0] == points[0]
    assert middle[-1] == points[-1]
    assert max(y for _, y in middle) == 10.0
    assert smoothed(points[:50]) == (points[:50], 1)


def test_points_lie_where_their_values_say():
    found = chart("x", "", [Series("x", "main", [(0, 0.0), (50, 5.0), (100, 10.0)])])
    assert found is not None
    places = [tuple(map(float, p.split())) for p in re.split("[ML]", found.lines[0].path)[1:]]
    assert [x for x, _ in places] == [0, 500, 1000]
    assert places[0][1] == 300  # zero is the floor
    assert places[1][1] == pytest.approx((places[0][1] + places[2][1]) / 2, abs=0.1)
    ticks = dict(found.y_ticks)
    assert ticks["0"] == 100
    assert places[2][1] / 3 == pytest.approx(ticks["10"], abs=0.1)
    assert dict(found.x_ticks)["40"] == 40


def test_one_point_is_a_dot_and_no_point_is_no_chart():
    found = chart("x", "", [Series("x", "main", [(1, 3.0)]), Series("empty", "second", [])])
    assert found is not None
    assert len(found.lines) == 1
    assert found.lines[0].dots == "M500.0 150.0h0"
    assert found.lines[0].path == ""
    assert [label for label, _ in found.x_ticks] == ["1"]
    assert chart("x", "", [Series("x", "main", [])]) is None


def test_a_limit_outside_the_values_is_not_drawn():
    line = Series("x", "main", [(1, 0.1), (2, 0.2)])
    assert [row.style for row in chart("x", "", [line], limits=[(5.0, "clip")]).lines] == ["main"]
    assert [row.style for row in chart("x", "", [line], limits=[(0.15, "clip")]).lines] == ["main", "limit"]


def test_the_description_says_the_curve_in_words():
    found = chart("Loss", "nats", [Series("train", "main", [(1, 5.0), (2, 2.0), (3, 3.0)])])
    assert found.description == "Loss in nats: train from 5 at step 1 to 3 at step 3, lowest 2 at step 2"
