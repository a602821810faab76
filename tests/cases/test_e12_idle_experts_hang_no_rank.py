"""E12: ranks that route to different experts, and experts without a token, train like one process."""

from __future__ import annotations

import pytest
import torch

from tercet.engine import Terms
from tercet.spec.model import Balance
from tests.deepseek_tiny import tiny_deepseek
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, STEPS = 6, 5


def train_forced(world, word, micro, deepspeed=False):
    """Route row r to experts 2 (r mod 2) and 3: on two ranks they differ, and experts 4 to 7 stay idle."""
    model = tiny_deepseek(mtp_depth=0)
    if deepspeed:
        engine = engine_of(world, layout(word, world.size, ROWS, micro), ROWS, "fp32", model)
    else:
        engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro), model=model)
    gates = [m for m in engine.module.modules() if type(m).__name__ == "Gate"]
    losses = []
    for step in range(STEPS):
        batches = micro_batches(step, world.rank, world.size, micro, ROWS)
        rows = iter([batch.rows for batch in batches])
        for gate in gates:

            def forced(scores, rows=rows, micro=micro):
                first = torch.tensor([max(r, 0) % 2 * 2 for r in next(rows)]).repeat_interleave(len(scores) // micro)
                return torch.stack((first, torch.full_like(first, 3)), 1)

            gate._choose = forced
        result = engine.step(batches, 1e-2, Terms(Balance(bias_speed=0.001)))
        losses.append((result.loss, result.grad_norm))
        assert result.load["idle_experts"] == 5
    return losses, whole_weights(engine)


@pytest.mark.parametrize("word", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_equal_to_one_process(pools, size, word):
    losses, weights = pools[1].run(train_forced, "single", ROWS)[0]
    for got, got_weights in pools[size].run(train_forced, word, 1):
        for (loss, norm), (expected, expected_norm) in zip(got, losses, strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(got_weights[name], tensor, rtol=1e-4, atol=1e-6)


@needs_deepspeed
@pytest.mark.parametrize("word", ["zero1", "zero2", "zero3"])
def test_deepspeed_equals_one_process(pools, word):
    losses, weights = pools[1].run(train_forced, "single", ROWS)[0]
    for got, got_weights in pools[2].run(train_forced, word, 1, True):
        for (loss, norm), (expected, expected_norm) in zip(got, losses, strict=True):
            assert loss == pytest.approx(expected, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-4)
        for name, tensor in weights.items():
            torch.testing.assert_close(got_weights[name], tensor, rtol=1e-4, atol=1e-5)


def save_and_go_on(world, folder):
    engine = tiny_engine(world, tiny_strategy("zero2", world.size, ROWS, 1), model=tiny_deepseek())
    terms = Terms(Balance(bias_speed=0.01, batch_loss=0.1), mtp_weight=0.3)

    def steps(first, last):
        for s in range(first, last):
            engine.step(micro_batches(s, world.rank, world.size, 1, ROWS), 1e-2, terms)

    steps(0, 3)
    engine.save(folder).wait()
    world.barrier()
    steps(3, 5)
    straight = whole_weights(engine)
    steps(5, 6)  # away from the saved state
    engine.load(folder)
    steps(3, 5)
    return straight, whole_weights(engine)


def test_biases_and_shares_are_saved(pools, tmp_path):
    """A resumed run equals one that was not interrupted, bit for bit, balancing included."""
    for straight, resumed in pools[2].run(save_and_go_on, tmp_path):
        assert any(name.endswith("e_score_correction_bias") for name in straight)
        for name, tensor in straight.items():
            assert torch.equal(resumed[name], tensor), name
