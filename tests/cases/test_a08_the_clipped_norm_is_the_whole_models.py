"""A08: gradient norm and clipping are those of the unsharded model, the same on every rank."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, CLIP = 6, 0.01  # far below the norm, so clipping decides the update


def train(world: World, word: str, micro: int):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro), clip=CLIP)
    norms = [engine.step(micro_batches(s, world.rank, world.size, micro, ROWS), 1e-2).grad_norm for s in range(3)]
    return norms, whole_weights(engine)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", STRATEGIES)
def test_norm_and_update_equal_one_process(pools, size, word):
    norms, weights = pools[1].run(train, "single", 2)[0]
    assert min(norms) > 10 * CLIP
    results = pools[size].run(train, word, 1)
    assert len({tuple(r[0]) for r in results}) == 1, "ranks disagree about the norm"
    assert results[0][0] == pytest.approx(norms, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(results[0][1][name], tensor, rtol=1e-4, atol=1e-6)
