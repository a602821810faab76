"""A10: 256 equal tiny gradients in bf16 add up to 256 times one, under every strategy."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_strategy

STEPS = 256


def gradients(world: World, word: str, count: int) -> dict[str, torch.Tensor]:
    engine = tiny_engine(world, tiny_strategy(word, world.size, count * world.size, 1), "bf16", clip="none")
    batch = micro_batches(0, 0, 1, 1, 1)[0]  # every micro-batch of every rank is this one
    layout, module = engine.layout, engine.module
    layout.begin_step()
    for n in range(count):
        layout.begin_micro_batch(n == count - 1)
        loss = module(batch.input_ids, positions=batch.positions, documents=batch.documents, labels=batch.labels)
        (loss / 1000).backward()
    layout.finish_gradients()
    found = {p.name: p.value.grad.clone() for p in layout.parts}
    layout.end_step()
    return found


@pytest.mark.parametrize("word", STRATEGIES)
def test_sum_is_256_times_one(pools, word):
    ones = pools[2].run(gradients, word, 1)
    for one, many in zip(ones, pools[2].run(gradients, word, STEPS), strict=True):
        for name, gradient in many.items():
            assert gradient.dtype == torch.float32
            size = one[name].abs().max() * STEPS
            assert (gradient - one[name] * STEPS).abs().max() <= 0.01 * size, name
