"""Loss weights per token: the weighted mean over all ranks and micro-batches, the same under every layout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tercet.parallel.world import World
from tests.tiny import micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS = 6
ALONE = World(0, 1, 0, torch.device("cpu"))


def weighted(step: int, rank: int, ranks: int, micro: int):
    """The global batch with weights 0.25, 0.5, 1 and 2 that hang on row and place alone."""
    batches = micro_batches(step, rank, ranks, micro, ROWS)
    for batch in batches:
        number = torch.tensor(batch.rows)[:, None] + torch.arange(batch.labels.shape[1])
        batch.weights = torch.tensor([0.25, 0.5, 1.0, 2.0])[number % 4]
    return batches


def train(world: World, word: str, micro: int):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro))
    results = [engine.step(weighted(step, world.rank, world.size, micro), 1e-2) for step in range(2)]
    sums = torch.tensor([engine.evaluate(b) for b in weighted(0, world.rank, world.size, micro)], dtype=torch.float64)
    return [(r.loss, r.tokens) for r in results], world.sum(sums.sum(0)).tolist(), whole_weights(engine)


def test_the_loss_is_the_weighted_mean_and_the_gradient_its_gradient():
    """Against plain autograd in float64, written out."""
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 2), clip="none")
    reference = {n: p.detach().double().requires_grad_() for n, p in engine.module.named_parameters()}
    batches, total, weight = weighted(0, 0, 1, 2), torch.zeros((), dtype=torch.float64), 0.0
    for batch in batches:
        kwargs = {"positions": batch.positions, "documents": batch.documents}
        logits = torch.func.functional_call(engine.module, reference, (batch.input_ids,), kwargs)
        each = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="none")
        total = total + (each * batch.weights.flatten()).sum()
        weight += batch.weights[batch.labels != -100].sum().item()
    (total / weight).backward()
    norm = torch.stack([p.grad.norm() for p in reference.values()]).norm()
    result = engine.step(batches, 1e-2)
    assert result.loss == pytest.approx((total / weight).item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert result.tokens == sum(int((b.labels != -100).sum()) for b in batches)


@pytest.mark.parametrize(("ranks", "word", "micro"), [(2, "zero2", 1), (3, "ddp", 2), (3, "zero3", 1)])
def test_one_two_and_three_ranks_agree(pools, ranks, word, micro):
    results, sums, weights = pools[1].run(train, "single", ROWS)[0]
    for got_results, got_sums, got in pools[ranks].run(train, word, micro):
        assert [tokens for _, tokens in got_results] == [tokens for _, tokens in results]
        assert [loss for loss, _ in got_results] == pytest.approx([loss for loss, _ in results], rel=1e-5)
        assert got_sums == pytest.approx(sums, rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)


def test_weights_of_one_change_nothing():
    plain = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 2))
    ones = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 2))
    batches = micro_batches(0, 0, 1, 2, ROWS)
    first = plain.step(batches, 1e-2)
    for batch in batches:
        batch.weights = torch.ones(batch.labels.shape)
    assert ones.step(batches, 1e-2) == first
