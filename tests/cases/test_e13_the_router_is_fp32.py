"""E13: the router computes in fp32 in every mode, and chooses in bf16 what it chooses in fp32."""

from __future__ import annotations

import pytest
import torch

from tercet.model.moe import Gate, MixtureOfExperts
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_strategy

ROWS = 6


def chosen_in_float64(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """DeepSeek-V3's choice (arXiv 2412.19437, section 2.1.2), written out for two groups of which one is kept."""
    scores = (x.double() @ weight.double().T).sigmoid() + bias.double()
    groups = scores.unflatten(-1, (2, 4))
    best = groups.topk(2, dim=-1).values.sum(-1).argmax(-1)
    kept = torch.arange(8) // 4 == best[:, None]
    return scores.masked_fill(~kept, -torch.inf).topk(2, dim=-1).indices.sort(-1).values


def train_bf16(world, word):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1), "bf16", tiny_deepseek())
    seen = []

    def watch(gate, inputs, choice):
        weights, experts, scores = choice
        (x,) = inputs
        expected = chosen_in_float64(x.detach(), gate.weight.detach(), gate.e_score_correction_bias)
        seen.append((scores.dtype, weights.dtype, torch.equal(experts.sort(-1).values, expected)))

    for module in engine.module.modules():
        if isinstance(module, Gate):
            module.register_forward_hook(watch)
    for step in range(2):
        result = engine.step(micro_batches(step, world.rank, world.size, 1, ROWS), 1e-2)
        assert result.updated
    dtypes = {b.dtype for b in engine.balancer.biases().values()}
    return seen, dtypes


@pytest.mark.parametrize(("size", "word"), [(1, "single"), (2, "ddp"), (2, "zero2"), (2, "zero3")])
def test_scores_and_weights_are_fp32(pools, size, word):
    for seen, dtypes in pools[size].run(train_bf16, word):
        assert seen
        assert set(seen) == {(torch.float32, torch.float32, True)}
        assert dtypes == {torch.float32}


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_chooses_as_fp32(autocast):
    spec = tiny_deepseek().layers[1].feedforward
    torch.manual_seed(0)
    block = MixtureOfExperts(spec, 32)
    for p in block.parameters():
        torch.nn.init.normal_(p, 0, 0.2)
    block.gate.e_score_correction_bias.normal_(0, 0.05)
    block = block.bfloat16()
    assert block.gate.e_score_correction_bias.dtype == torch.float32  # it takes steps of 0.001, lost in bf16
    x = torch.randn(64, 32).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        _, half, scores = block.gate(x)
    _, full, expected = block.float().gate(x.float())
    assert scores.dtype == torch.float32
    assert torch.equal(half.sort(-1).values, full.sort(-1).values)
    torch.testing.assert_close(scores, expected)
