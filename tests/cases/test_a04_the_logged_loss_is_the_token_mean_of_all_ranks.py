"""A04: same numbers logged for any ranks x accumulation; a fresh model starts near ln(vocabulary)."""

from __future__ import annotations

import math

import pytest

from tercet.parallel.world import World
from tests.tiny import global_batch, micro_batches, tiny_engine, tiny_strategy

ROWS = 12


def first_step(world: World, micro: int):
    engine = tiny_engine(world, tiny_strategy("ddp", world.size, ROWS, micro))
    r = engine.step(micro_batches(0, world.rank, world.size, micro, ROWS), 1e-2)
    return r.loss, r.grad_norm, r.tokens


@pytest.mark.parametrize(("size", "micro"), [(1, 3), (2, 3), (3, 1), (3, 4)])
def test_same_on_every_layout_and_rank(pools, size, micro):
    expected = pools[1].run(first_step, ROWS)[0]
    for got in pools[size].run(first_step, micro):
        assert got[2] == expected[2]
        assert got[:2] == pytest.approx(expected[:2], rel=1e-5)


def test_starts_at_the_uniform_guess(pools):
    loss, _, tokens = pools[1].run(first_step, ROWS)[0]
    _, labels = global_batch(0, ROWS)
    labels[:, 7] = -100  # the document border inside each row
    assert tokens == int((labels != -100).sum())
    assert loss == pytest.approx(math.log(67), rel=0.02)
