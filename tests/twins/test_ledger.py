"""Bytes that ranks hold equal the plan's, exactly, at both moments, shard padding included."""

from __future__ import annotations

import pytest

from tercet.parallel.world import World
from tercet.planner.job import of_strategy
from tercet.planner.ledger import host_rows, ledger_for
from tercet.spec.counts import Counts
from tercet.spec.strategy import Work
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_model, tiny_strategy

ROWS_EXACT = ("weights", "master", "gradients", "optimizer")


def held(world: World, word: str, precision: str, rows: int, keys: dict, tied: bool):
    model = tiny_model(tied=tied)
    strategy = tiny_strategy(word, world.size, rows, 1, **keys)
    engine = tiny_engine(world, strategy, precision, model)
    for step in range(2):
        engine.step(micro_batches(step, world.rank, world.size, 1, rows), 1e-3)
    planned = ledger_for(model, strategy, Work(16, rows, precision), world.rank)
    return engine.memory(), planned


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("word", STRATEGIES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_exact(pools, precision, size, word, accumulation):
    if size == 1 and word != "ddp":
        pytest.skip("one rank has nothing to shard")
    for keys in [{}] + ([{"reduce_gradients": "once_per_step"}] if word in ("zero2", "zero3") else []):
        for measured, planned in pools[size].run(held, word, precision, size * accumulation, keys, word == "zero2"):
            for moment in ("between_steps", "peak"):
                got = {row: measured[moment].get(row, 0) for row in ROWS_EXACT}
                assert got == {row: planned[moment][row] for row in ROWS_EXACT}, (moment, keys)


OFFLOADED = [
    ("ddp", 1, "optimizer"),
    ("ddp", 3, "optimizer"),
    ("zero1", 2, "optimizer"),
    ("zero2", 3, "optimizer"),
    ("zero3", 3, "optimizer"),
    ("zero3", 3, "weights"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("word", "size", "what"), OFFLOADED)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_exact_with_the_optimizer_or_the_weights_on_the_host(pools, precision, word, size, what, accumulation):
    rows = size * accumulation
    keys = {"offload": {what: "cpu"}}
    found = pools[size].run(held, word, precision, rows, keys, False)
    for measured, planned in found:
        for moment in ("between_steps", "peak"):
            got = {row: measured[moment].get(row, 0) for row in ROWS_EXACT}
            assert got == {row: planned[moment][row] for row in ROWS_EXACT}, moment
    # What has left the cards is on the host: masters and moments, and at the peak the gradients.
    model = tiny_model()
    work = Work(16, rows, precision)
    host = host_rows(Counts(model), of_strategy(tiny_strategy(word, size, rows, 1, **keys), work), True)
    for row in ("states", "pinned"):
        assert sum(m["peak"][row] for m, _ in found) == pytest.approx(host[row], rel=0.05), row
