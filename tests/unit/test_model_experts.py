"""Running experts: every way gives what a loop over tokens gives, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tercet.model.experts import Experts, _padded, expert_linear
from tercet.spec.blocks.moe import MoE

SPEC = MoE(experts=6, experts_per_token=2, ffn=24)
WIDTH, TOKENS = 32, 50


def build(dtype):
    torch.manual_seed(0)
    experts = Experts(SPEC, WIDTH)
    for p in experts.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    experts = experts.to(dtype)
    x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(TOKENS)])  # expert 5 has no token
    weights = torch.rand(TOKENS, 2).requires_grad_()
    return experts, x, chosen, weights


def by_token(experts, x, chosen, weights):
    """The definition: for each token the weighted sum of its experts' outputs, in float64."""
    rows = []
    for t in range(TOKENS):
        total = 0
        for k in range(2):
            e = chosen[t, k]
            gate, up = (experts.gate_up_proj[e].double() @ x[t].double()).chunk(2)
            total = total + weights[t, k].double() * (experts.down_proj[e].double() @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def results(run, experts, x, chosen, weights):
    for tensor in (*experts.parameters(), x, weights):
        tensor.grad = None
    out = run(x, chosen, weights)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
    return [out.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_equal_to_the_definition(dtype, bound):
    experts, x, chosen, weights = build(dtype)
    got = results(experts, experts, x, chosen, weights)
    expected = results(lambda *a: by_token(experts, *a), experts, x, chosen, weights)
    for one, other in zip(got, expected, strict=True):
        scale = other.double().abs().max()
        assert ((one.double() - other.double()).abs().max() / scale) <= bound
    assert not got[3][5].any()  # the idle expert's gradient is there, and zero
    assert not got[4][5].any()


def test_filled_places_change_nothing():
    """bf16 runs are filled up to sixteens; without that the result is the same but for the rounding of matmuls."""
    experts, x, chosen, weights = build(torch.bfloat16)
    filled = results(experts, experts, x, chosen, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tercet.model.experts._padded", lambda token, weights, expert, counts: (token, weights, counts))
        plain = results(experts, experts, x, chosen, weights)
    for one, other in zip(filled, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_runs_are_filled_to_few_lengths():
    expert = torch.tensor([0] * 5 + [2] * 16 + [3] * 17)
    token = torch.arange(38)
    weights = torch.arange(1.0, 39.0)
    counts = torch.tensor([5, 0, 16, 17])
    new_token, new_weights, longer = _padded(token, weights, expert, counts)
    assert longer.tolist() == [16, 0, 16, 32]
    real = new_weights > 0
    assert torch.equal(new_token[real], token)
    assert torch.equal(new_weights[real], weights)
    assert real.nonzero().flatten().tolist() == [*range(5), *range(16, 32), *range(32, 49)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sorted_rows_can_be_run_by_themselves(dtype):
    """What expert parallelism calls: rows that arrived from elsewhere, sorted by expert."""
    experts, x, _, _ = build(dtype)
    counts = torch.tensor([20, 0, 10, 5, 15, 0])
    out = experts.run(x, counts)
    begin = 0
    for e, count in enumerate(counts.tolist()):
        gate, up = F.linear(x[begin : begin + count], experts.gate_up_proj[e]).chunk(2, -1)
        expected = F.linear(F.silu(gate) * up, experts.down_proj[e])
        torch.testing.assert_close(out[begin : begin + count], expected, rtol=2e-2, atol=2e-2)
        begin += count
    assert expert_linear(x[:0], experts.gate_up_proj, torch.zeros(6, dtype=torch.int64)).shape == (0, 48)
