"""G20: an epoch's order is computed once per source, however many weighted sources there are."""

from __future__ import annotations

import pytest

from tercet.data import order
from tests.texts import made, sentence, write_rows


@pytest.mark.parametrize("sources", [3, 9, 20])
def test_each_order_is_computed_once_an_epoch(tmp_path, monkeypatch, sources):
    paths = [write_rows(tmp_path / f"{n}.jsonl", [sentence(100 * n + k, 30) for k in range(4)]) for n in range(sources)]
    prepared = made(tmp_path, [{"path": str(p), "weight": 1 + n % 3} for n, p in enumerate(paths)])
    computed = []
    right = order.permutation

    def counted(count, *parts):
        computed.append((count, *parts))
        return right(count, *parts)

    monkeypatch.setattr(order, "permutation", counted)
    mix = prepared.train
    places = [mix.place(sample) for sample in range(10 * sources)]
    assert len(computed) == len(set(computed)) > sources
    # A resumed run begins anywhere and finds the same rows.
    again = type(mix)(mix.sources, mix.weights, mix.seed)
    assert [again.place(sample) for sample in reversed(range(10 * sources))] == places[::-1]
