"""Order and mixing: pure functions of the seed and the sample's number."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.data import order
from tercet.data.mix import Mix, Mixing, read_weights
from tercet.errors import InputError
from tercet.spec.recipe import DataSection


class Counted:
    """Stands for a set of rows: only its length matters for the order."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


def mix(sizes, weights=None, seed=0):
    return Mix(tuple(Counted(n) for n in sizes), weights, seed)


def test_splitmix64_gives_the_published_numbers():
    """The first outputs for seed 1234567, as the reference implementation prints them."""
    states = np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert order.splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_the_order_is_fixed_for_ever():
    """A change here would change the order of every run that is resumed."""
    assert order.permutation(10, 0, 1).tolist() == [9, 0, 6, 7, 4, 3, 2, 1, 8, 5]


@given(st.integers(1, 400), st.integers(0, 2**32 - 1), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_each_epoch_has_every_row_once(rows, seed, epoch):
    sizes = [rows, 3, 1]
    total = rows + 4
    m = mix(sizes, seed=seed)
    seen = Counter(m.place(epoch * total + i) for i in range(total))
    assert seen == Counter((s, r) for s, n in enumerate(sizes) for r in range(n))


def test_epochs_and_seeds_differ():
    places = [[mix([50], seed=s).place(e * 50 + i) for i in range(50)] for s in (0, 1) for e in (0, 1)]
    assert len({tuple(p) for p in places}) == 4


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_shares_are_exact_at_every_step(parts, samples):
    weights = tuple(Fraction(p, sum(parts)) for p in parts)
    now, then = order.apportion(weights, samples), order.apportion(weights, samples + 1)
    assert sum(now) == samples
    assert all(a <= b for a, b in zip(now, then, strict=True))
    # Webster: no sample moved from one source to another would be fairer.
    for i, w in enumerate(weights):
        for j, v in enumerate(weights):
            if now[j]:
                assert (2 * now[i] + 1) / w >= (2 * now[j] - 1) / v


def test_weights_are_the_share_of_what_is_trained():
    m = mix([5, 400], weights=(3.0, 1.0), seed=7)
    places = [m.place(n) for n in range(400)]
    assert Counter(s for s, _ in places) == {0: 300, 1: 100}
    assert Counter(places)[(0, 2)] == 60  # 300 samples of 5 rows: each as often as the others
    assert len({p for p in places if p[0] == 1}) == 100  # of the large source none comes twice
    assert all(abs(sum(s == 0 for s, _ in places[:n]) - 0.75 * n) <= 1 for n in range(400))


def test_sources_of_one_size_have_orders_of_their_own_and_the_seeds():
    """Rows of translations or of pairs in two files would else come side by side, always."""

    def orders(seed):
        m = mix([50, 50], weights=(0.5, 0.5), seed=seed)
        places = [m.place(n) for n in range(100)]
        return [tuple(row for s, row in places if s == source) for source in (0, 1)]

    assert len({*orders(0), *orders(1)}) == 4


def test_any_sample_can_be_asked_for_alone():
    m = mix([7, 9], weights=(0.3, 0.7), seed=3)
    forward = [m.place(n) for n in range(200)]
    assert [mix([7, 9], weights=(0.3, 0.7), seed=3).place(n) for n in reversed(range(200))] == forward[::-1]


def test_all_sources_have_weights_or_none_has():
    assert read_weights([None, None], ["a", "b"]) is None
    assert read_weights([1, 2.5], ["a", "b"]) == (1.0, 2.5)
    with pytest.raises(InputError, match="b has no weight"):
        read_weights([1, None], ["a", "b"])


def mixing(sources, **keys):
    return Mixing.of(DataSection.model_validate({"train": sources, **keys}))


def test_epochs_of_a_source_repeat_each_of_its_rows_so_often():
    m = mixing([{"path": "a", "epochs": 3}, {"path": "b"}]).mix((Counted(7), Counted(11)), seed=5)
    assert m.rows_per_epoch == 3 * 7 + 11
    for epoch in range(2):
        places = [m.place(n) for n in range(epoch * 32, (epoch + 1) * 32)]
        assert Counter(places) == {**{(0, r): 3 for r in range(7)}, **{(1, r): 1 for r in range(11)}}
    alone = mixing([{"path": "a", "epochs": 2}]).mix((Counted(5),), seed=1)
    assert Counter(alone.place(n) for n in range(10)) == {(0, r): 2 for r in range(5)}


def test_a_temperature_raises_the_share_of_small_sources():
    sizes = (Counted(900), Counted(100))
    shares = [mixing(["a", "b"], temperature=t).mix(sizes, seed=0).shares for t in (1, 2, 100)]
    assert [round(float(s[1]), 3) for s in shares] == [0.1, 0.25, 0.495]
    m = mixing(["a", "b"], temperature=2).mix(sizes, seed=0)
    assert Counter(m.place(n)[0] for n in range(1000)) == {0: 750, 1: 250}


def test_two_ways_to_share_are_not_mixed():
    for sources, keys in (
        ([{"path": "a", "epochs": 2, "weight": 1}, {"path": "b", "weight": 1}], {}),
        ([{"path": "a", "epochs": 2}, "b"], {"temperature": 2}),
    ):
        with pytest.raises(InputError, match="each of them says how sources share"):
            mixing(sources, **keys)
