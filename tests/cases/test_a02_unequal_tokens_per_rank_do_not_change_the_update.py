"""A02: the token count is summed over ranks, also when a rank has no trained token at all."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS = 6


def train(world: World, word: str, micro: int, empty_row: int):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro))
    losses = []
    for step in range(2):
        batches = micro_batches(step, world.rank, world.size, micro, ROWS)
        for batch in batches:
            for place, row in enumerate(batch.rows):
                if row % 3 == empty_row:
                    batch.labels[place] = -100
        losses.append(engine.step(batches, 1e-2).loss)
    return losses, whole_weights(engine)


@pytest.mark.parametrize("word", STRATEGIES)
def test_a_rank_without_trained_tokens_changes_nothing(pools, word):
    # Row 2, 5 go to rank 2 when three ranks take one row each: that rank trains nothing.
    losses, weights = pools[1].run(train, "single", ROWS, 2)[0]
    for got_losses, got in pools[3].run(train, word, 1, 2):
        assert got_losses == pytest.approx(losses, rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)
