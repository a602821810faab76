"""A01: gradient of a step = sum of token losses / trained tokens of the step, for any split into micro-batches."""

from __future__ import annotations

import pytest
import torch

from tercet.parallel.world import World
from tests.tiny import global_batch, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS = 8  # rows train 1, 2, 3, … tokens, the last all of them
ALONE = World(0, 1, 0, torch.device("cpu"))


def updated(micro: int) -> dict[str, torch.Tensor]:
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, micro), clip="none")
    engine.step(micro_batches(0, 0, 1, micro, ROWS), 1e-2)
    return whole_weights(engine)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_any_split_gives_the_same_update(micro):
    whole = updated(ROWS)
    for name, tensor in updated(micro).items():
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=1e-6)


def test_the_gradient_is_the_token_sum_over_the_token_count():
    """Against plain autograd in float64, written out."""
    engine = tiny_engine(ALONE, tiny_strategy("single", 1, ROWS, 2), clip="none")
    model = engine.module
    batches = micro_batches(0, 0, 1, 2, ROWS)
    reference = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        kwargs = {"positions": batch.positions, "documents": batch.documents}
        logits = torch.func.functional_call(model, reference, (batch.input_ids,), kwargs)
        total = total + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )
        tokens += batch.trained_tokens
    (total / tokens).backward()
    norm = torch.stack([p.grad.norm() for p in reference.values()]).norm()
    result = engine.step(batches, 1e-2)
    assert result.loss == pytest.approx((total / tokens).item(), rel=1e-6)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_rows_are_unequal_so_a_mean_of_means_would_differ():
    _, labels = global_batch(0, ROWS)
    counts = (labels != -100).sum(1).tolist()
    assert counts[:3] == [1, 2, 3]
