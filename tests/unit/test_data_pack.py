"""Packing: every document in one row, no row too long, as few rows as best-fit decreasing needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.data.pack import pack
from tercet.data.shards import Writer


def one_by_one(lengths, capacity):
    """Best-fit decreasing as a textbook has it; returns the room left in each row, sorted."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting, key=lambda n: room[n])] -= length
        else:
            room.append(capacity - length)
    return sorted(room)


@given(st.integers(1, 80), st.lists(st.integers(1, 80), max_size=120))
@settings(max_examples=200, deadline=None)
def test_packing_is_best_fit_decreasing(capacity, lengths):
    lengths = np.array([min(n, capacity) for n in lengths], dtype=np.int64)
    order, rows = pack(lengths, capacity)
    assert sorted(order.tolist()) == list(range(lengths.size))
    assert (np.diff(rows) >= 0).all()
    if lengths.size:
        assert set(rows.tolist()) == set(range(rows[-1] + 1))
        used = np.bincount(rows, weights=lengths[order])
        assert sorted((capacity - used).astype(int).tolist()) == one_by_one(lengths.tolist(), capacity)


def test_lengths_out_of_range_are_refused():
    for lengths in ([0], [9]):
        with pytest.raises(ValueError, match="between 1 and 8"):
            pack(np.array(lengths), 8)


@given(
    st.lists(st.lists(st.integers(0, 65535), min_size=1, max_size=25), min_size=1, max_size=30),
    st.sampled_from(["drop", "cut", "split"]),
)
@settings(max_examples=60, deadline=None)
def test_no_token_is_lost_and_no_document_cut_that_fits(tmp_path_factory, texts, rule):
    capacity = 10
    writer = Writer(tmp_path_factory.mktemp("rows"), "train-0", capacity, np.uint16)
    done = []
    for ids in texts:
        half = len(ids) // 2
        writer.append(np.array(ids[:half], dtype=np.uint32))
        writer.append(np.array(ids[half:], dtype=np.uint32))
        done.append(writer.end(rule))
    assert done == [rule if len(t) > capacity else None for t in texts]
    wanted = []
    for ids in texts:
        if len(ids) <= capacity:
            wanted.append(ids)
        elif rule == "cut":
            wanted.append(ids[:capacity])
        elif rule == "split":
            wanted += [ids[n : n + capacity] for n in range(0, len(ids), capacity)]
    rows = writer.finish()
    found = []
    for n in range(len(rows)):
        ids, lengths = rows.row(n)
        assert len(ids) == sum(lengths) <= capacity
        borders = np.cumsum(lengths)[:-1]
        found += [d.tolist() for d in np.split(ids, borders)]
    assert sorted(found) == sorted(wanted)
    assert rows.tokens == sum(map(len, wanted))
    assert rows.documents == len(wanted)
    assert not writer.scratch.exists()
