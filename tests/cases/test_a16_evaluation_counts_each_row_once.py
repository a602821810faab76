"""A16: evaluation loss = token sum / token count, each row once, for any batch size and 1 to 3 ranks."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.training.loop import Loop, Progress
from tests.tiny import micro_batches, tiny_engine, tiny_strategy

ROWS = 7


class Rows:
    def evaluation(self, *, rank, ranks, micro_batch):
        yield from micro_batches(3, rank, ranks, micro_batch, ROWS)


def evaluate(world: World, word: str, micro: int) -> float:
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1))
    progress = Progress()
    loop = Loop(
        engine,
        Rows(),
        world,
        None,
        None,
        TrainSection(),
        OptimSection(),
        total_steps=1,
        micro_batch=micro,
        checkpoint_every=0,
        progress=progress,
        stop_requested=lambda: False,
        state={},
    )
    loop._evaluate()
    return progress.validation_loss


@pytest.mark.parametrize(("size", "word"), [(1, "single"), (2, "ddp"), (3, "ddp"), (3, "zero3")])
@pytest.mark.parametrize("micro", [1, 2, 5])
def test_same_for_any_batch_size_and_ranks(pools, size, word, micro):
    engine = tiny_engine(World(0, 1, 0, torch.device("cpu")), tiny_strategy("single", 1, ROWS, 1))
    total, tokens = 0.0, 0
    for batch in micro_batches(3, 0, 1, 1, ROWS):
        with torch.no_grad():
            logits = engine.module.double()(batch.input_ids, positions=batch.positions, documents=batch.documents)
        total += torch.nn.functional.cross_entropy(
            logits[0], batch.labels[0], ignore_index=-100, reduction="sum"
        ).item()
        tokens += batch.trained_tokens
    for got in pools[size].run(evaluate, word, micro):
        assert got == pytest.approx(total / tokens, rel=1e-6)
