"""DeepSpeed's stages, with and without offload, give the losses, norms and weights of one native process.

Also A02 (a rank without trained tokens) and A08 (the clipped norm) for this engine.
"""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tercet.spec import deepspeed as limits
from tests.deepspeed_tiny import LAYOUTS, engine_of, layout, needs_deepspeed
from tests.ranks import Ranks
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

pytestmark = needs_deepspeed
ROWS, STEPS = 7, 3


def batches(step: int, world: World, micro: int, empty: bool):
    found = micro_batches(step, world.rank, world.size, micro, ROWS)
    for batch in found:
        for place, row in enumerate(batch.rows):
            if empty and row % 3 == 2:  # with three ranks and one row each: all of rank 2's
                batch.labels[place] = -100
    return found


def run(world: World, engine, micro: int, empty: bool):
    results = []
    for step in range(STEPS):
        r = engine.step(batches(step, world, micro, empty), 1e-2)
        results.append((r.loss, r.grad_norm, r.tokens, r.updated))
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in micro_batches(99, world.rank, world.size, micro, ROWS):
        sums += torch.tensor(engine.evaluate(batch), dtype=torch.float64)
    world.sum(sums)
    texts = engine.generate([[1, 2, 3], [4]], 5)
    after = engine.step(batches(STEPS, world, micro, empty), 1e-2)  # evaluation leaves nothing behind
    return results, after.loss, whole_weights(engine), (sums[0] / sums[1]).item(), texts


def native(world: World, precision: str, options: dict, empty: bool, tied: bool):
    engine = tiny_engine(world, tiny_strategy("single", 1, ROWS, ROWS), precision, tiny_model(tied=tied), **options)
    return run(world, engine, ROWS, empty)


def deepspeed(world: World, name: str, precision: str, options: dict, empty: bool, tied: bool, keys: dict):
    strategy = layout(name, world.size, ROWS, **{"micro_batch": 1, **keys})
    engine = engine_of(world, strategy, ROWS, precision, tiny_model(tied=tied), **options)
    return run(world, engine, strategy.micro_batch, empty)


@pytest.fixture(scope="module")
def alone(pools: dict[int, Ranks]):
    found: dict = {}

    def get(precision: str, options: dict, empty: bool, tied: bool):
        key = (precision, str(options), empty, tied)
        if key not in found:
            found[key] = pools[1].run(native, precision, options, empty, tied)[0]
        return found[key]

    return get


FAST = [(3, name, "fp32", {}, False, {}) for name in ("zero1", "zero2", "zero3", "zero2-cpu", "zero3-weights")]
FAST += [(2, "zero2-cpu", "bf16", {}, False, {}), (3, "zero3", "bf16", {}, False, {})]
FAST += [(3, name, "fp32", {"clip": 0.01}, True, {}) for name in ("zero2", "zero3")]
# Stage 0 adds micro-batches up in bf16, so there it takes the ranks' rows at once.
FAST += [(3, "zero0", "fp32", {"clip": 0.01}, True, {}), (2, "zero0", "bf16", {}, False, {"micro_batch": 4})]
MORE = [(2, name, "fp32", {}, False, {}) for name in LAYOUTS if "nvme" not in name]
MORE += [(2, name, "bf16", {}, False, {}) for name in ("zero1", "zero2", "zero3-weights")]
MORE += [(2, "zero3", "fp32", {"clip": "none"}, False, {"recompute": "full"}), (3, "zero1", "bf16", {}, False, {})]
MORE += [(3, "zero3-cpu", "fp32", {}, False, {}), (3, "zero1", "fp32", {"clip": 0.01}, True, {})]
CASES = FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in MORE]


@pytest.mark.parametrize(("size", "name", "precision", "options", "empty", "keys"), CASES)
def test_same_as_one_native_process(pools, alone, size, name, precision, options, empty, keys):
    tied = name in ("zero1", "zero3-cpu")
    results, after, weights, validation, texts = alone(precision, options, empty, tied)
    found = pools[size].run(deepspeed, name, precision, options, empty, tied, keys)
    fp32 = precision == "fp32"
    for got, got_after, got_weights, got_validation, got_texts in found:
        for (loss, norm, tokens, updated), expected in zip(got, results, strict=True):
            assert loss == pytest.approx(expected[0], rel=1e-6 if fp32 else 1e-3)
            assert norm == pytest.approx(expected[1], rel=1e-5 if fp32 else 1e-2)
            assert (tokens, updated) == (expected[2], True)
        assert got_after == pytest.approx(after, rel=1e-6 if fp32 else 1e-3)
        assert got_validation == pytest.approx(validation, rel=1e-6 if fp32 else 1e-3)
        if fp32:
            assert got_texts == texts
        for key, tensor in weights.items():
            torch.testing.assert_close(got_weights[key], tensor, rtol=1e-4, atol=1e-6 if fp32 else 5e-3)
    assert len({str(f[0]) for f in found}) == 1, "ranks disagree about loss or norm"


def small_buckets(world: World, name: str, precision: str):
    before, limits.LARGEST_BUCKET = limits.LARGEST_BUCKET, 1000
    try:
        return deepspeed(world, name, precision, {}, False, False, {})
    finally:
        limits.LARGEST_BUCKET = before


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("zero2-cpu", "bf16"),
        *(
            pytest.param(n, p, marks=pytest.mark.slow)
            for n, p in [
                ("zero3", "fp32"),
                ("zero1", "bf16"),
                ("zero1", "fp32"),
                ("zero2", "fp32"),
                ("zero2", "bf16"),
                ("zero3-cpu", "bf16"),
            ]
        ),
    ],
)
def test_tensors_larger_than_a_bucket(pools, alone, name, precision):
    """Embedding and head of a large vocabulary are: here embedding, head and feed-forward."""
    results, after, weights, _, _ = alone(precision, {}, False, False)
    fp32 = precision == "fp32"
    for got, got_after, got_weights, _, _ in pools[3].run(small_buckets, name, precision):
        assert [r[0] for r in got] == pytest.approx([r[0] for r in results], rel=1e-6 if fp32 else 1e-3)
        assert got_after == pytest.approx(after, rel=1e-6 if fp32 else 1e-3)
        for key, tensor in weights.items():
            torch.testing.assert_close(got_weights[key], tensor, rtol=1e-4, atol=1e-6 if fp32 else 5e-3)


def one(world: World):
    strategy = layout("zero2-cpu", 1, ROWS, 1)
    return run(world, engine_of(world, strategy, ROWS), 1, False)


def test_a_single_process_offloads_too(pools, alone):
    results, after, weights, _, _ = alone("fp32", {}, False, False)
    got, got_after, got_weights, _, _ = pools[1].run(one)[0]
    assert [r[0] for r in got] == pytest.approx([r[0] for r in results], rel=1e-6)
    assert got_after == pytest.approx(after, rel=1e-6)
    for key, tensor in weights.items():
        torch.testing.assert_close(got_weights[key], tensor, rtol=1e-4, atol=1e-6)
