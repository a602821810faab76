"""A01, A05, A10 under DeepSpeed: any split gives one update, the rate is the one asked for, sums are in fp32."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_engine, tiny_strategy, whole_weights

pytestmark = needs_deepspeed
slow = pytest.mark.slow
ROWS = 8


def split(world: World, name: str, micro: int):
    engine = engine_of(world, layout(name, world.size, ROWS, micro), ROWS, clip="none")
    engine.step(micro_batches(0, world.rank, world.size, micro, ROWS), 1e-2)
    return whole_weights(engine)


def native(world: World):
    engine = tiny_engine(world, tiny_strategy("single", 1, ROWS, ROWS), clip="none")
    engine.step(micro_batches(0, 0, 1, ROWS, ROWS), 1e-2)
    return whole_weights(engine)


@pytest.mark.parametrize(
    ("name", "micro"),
    [("zero2", 4), *(pytest.param(*case, marks=slow) for case in [("zero0", 2), ("zero2", 1), ("zero3", 2)])],
)
def test_a01_any_split_gives_the_same_update(pools, name, micro):
    whole = pools[1].run(native)[0]
    for found in pools[2].run(split, name, micro):
        for key, tensor in found.items():
            torch.testing.assert_close(tensor, whole[key], rtol=0, atol=1e-6)


def rates(world: World, name: str):
    engine = engine_of(world, layout(name, world.size, ROWS), ROWS, clip="none")
    batches = micro_batches(0, world.rank, world.size, 1, ROWS)
    begin = whole_weights(engine)
    engine.step(batches, 0.0)
    still = whole_weights(engine)
    engine.step(batches, 3e-3)
    return begin, still, whole_weights(engine)


@pytest.mark.parametrize("name", ["zero3", *(pytest.param(name, marks=slow) for name in ("zero0", "zero1"))])
def test_a05_the_rate_is_the_argument_and_moves_once_per_update(pools, name):
    """Four micro-batches a step: with rate 0 nothing moves at all; AdamW then moves by about the rate, not more."""
    for begin, still, moved in pools[2].run(rates, name):
        largest = 0.0
        for key, tensor in begin.items():
            assert torch.equal(still[key], tensor), key
            largest = max(largest, (moved[key] - tensor).abs().max().item())
        assert 1e-4 < largest < 1.1 * 3e-3 * (1 + 0.1 * 3)  # lr, and lr times decay times a weight


def norm_of(world: World, name: str, count: int) -> tuple[float, float]:
    """Return (norm of the mean gradient, of count equal micro-batches; loss)."""
    engine = engine_of(world, layout(name, world.size, count * world.size), count * world.size, "bf16", clip="none")
    batch = micro_batches(0, 0, 1, 1, 1)[0]
    result = engine.step([batch] * count, 1e-2)
    return result.grad_norm, result.loss


@pytest.mark.parametrize(
    ("name", "count"), [("zero1", 16), *(pytest.param(name, 256, marks=slow) for name in ("zero2", "zero3"))]
)
def test_a10_equal_tiny_gradients_add_up(pools, name, count):
    one, loss = pools[2].run(norm_of, name, 1)[0]
    for many, same in pools[2].run(norm_of, name, count):
        assert same == pytest.approx(loss, rel=1e-6)
        assert many == pytest.approx(one, rel=0.01)
