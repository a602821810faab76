"""A10: many equal tiny gradients in bf16 add up to as many times one, under every strategy."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.tiny import micro_batches, tiny_engine, tiny_strategy

# bf16 stops adding ones at 256; zero 2 and 3 communicate in every micro-batch, so fewer must do there.
STEPS = {"ddp": 256, "zero1": 256, "zero2": 64, "zero3": 64}


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


@pytest.mark.parametrize(
    "word", ["ddp", "zero2", *(pytest.param(w, marks=pytest.mark.slow) for w in ("zero1", "zero3"))]
)
def test_sum_is_as_many_times_one(pools, word):
    steps = STEPS[word]
    ones = pools[2].run(gradients, word, 1)
    for one, many in zip(ones, pools[2].run(gradients, word, steps), strict=True):
        for name, gradient in many.items():
            assert gradient.dtype == torch.float32
            size = one[name].abs().max() * steps
            assert (gradient - one[name] * steps).abs().max() <= 0.01 * size, name
