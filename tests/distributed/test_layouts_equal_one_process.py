"""Every strategy on 2 and 3 ranks gives the losses, norms and weights of one process."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.ranks import Ranks
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

ROWS, STEPS = 7, 4


def train(world: World, word: str, micro: int, precision: str, keys: dict, tied: bool):
    strategy = tiny_strategy(word, world.size, ROWS, micro, **keys)
    engine = tiny_engine(world, strategy, precision, tiny_model(tied=tied))
    results = []
    for step in range(STEPS):
        r = engine.step(micro_batches(step, world.rank, world.size, micro, ROWS), 1e-2)
        results.append((r.loss, r.grad_norm, r.tokens, r.updated))
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in micro_batches(99, world.rank, world.size, micro, ROWS):
        sums += torch.tensor(engine.evaluate(batch), dtype=torch.float64)
    world.sum(sums)
    texts = engine.generate([[1, 2, 3], [4]], 5)
    return results, whole_weights(engine), (sums[0] / sums[1]).item(), texts


@pytest.fixture(scope="module")
def alone(pools: dict[int, Ranks]):
    return {
        (precision, tied): pools[1].run(train, "ddp", ROWS, precision, {}, tied)[0]
        for precision in ("fp32", "bf16")
        for tied in (False, True)
    }


@pytest.mark.parametrize("word", STRATEGIES)
@pytest.mark.parametrize(
    ("size", "precision", "keys"),
    [
        (3, "fp32", {}),
        (2, "fp32", {}),
        (3, "bf16", {}),
        (3, "fp32", {"recompute": "full"}),
        (3, "fp32", {"reduce_gradients": "once_per_step"}),
        *(
            pytest.param(2, p, k, marks=pytest.mark.slow)
            for p, k in [("bf16", {}), ("fp32", {"recompute": "full"}), ("fp32", {"reduce_gradients": "once_per_step"})]
        ),
    ],
)
def test_same_as_one_process(pools, alone, size, word, precision, keys):
    tied = word in ("zero1", "zero3")
    results, weights, evaluation, texts = alone[precision, tied]
    for got in pools[size].run(train, word, 1, precision, keys, tied):
        bound = 1e-5 if precision == "fp32" else 2e-3
        for (loss, norm, tokens, updated), expected in zip(got[0], results, strict=True):
            assert updated
            assert tokens == expected[2]
            assert loss == pytest.approx(expected[0], rel=bound)
            assert norm == pytest.approx(expected[1], rel=bound if precision == "fp32" else 2e-2)
        assert got[2] == pytest.approx(evaluation, rel=bound)
        if precision == "fp32":
            for name, tensor in weights.items():
                torch.testing.assert_close(got[1][name], tensor, rtol=1e-4, atol=1e-6)
            assert got[3] == texts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_batch_is_learned_by_heart(precision):
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), tiny_strategy("single", 1, ROWS, ROWS), precision)
    batches = micro_batches(0, 0, 1, ROWS, ROWS)
    losses = [engine.step(batches, 3e-2).loss for _ in range(40)]
    assert losses[-1] < 0.1 * losses[0]
