"""Balance losses and the bias rule against the papers' formulas, written out with loops in float64."""

from __future__ import annotations

import pytest
import torch

from tercet.model.balance import Balancer, Tally, balance_loss, document_numbers
from tercet.model.moe import MixtureOfExperts
from tercet.spec.blocks.moe import Gate, MoE
from tercet.spec.model import Balance

IGNORED = -100


def inputs(seed=0):
    """Two rows of 10 tokens: documents 0-6, 6-10 | 10-15, 15-20; the last one is padding."""
    torch.manual_seed(seed)
    scores = torch.rand(20, 6, dtype=torch.float64).requires_grad_()
    experts = scores.detach().topk(2, -1).indices
    labels = torch.randint(0, 9, (2, 10))
    labels[0, 5] = labels[0, 2] = IGNORED
    labels[1, 5:] = IGNORED
    labels[1, 4] = IGNORED
    return scores, experts, labels, torch.tensor([0, 6, 10, 15, 20], dtype=torch.int32)


def test_sequence_loss_is_the_papers():
    """DeepSeek-V3, equations 17 to 20, per row over its real tokens, times the row's trained tokens."""
    scores, experts, labels, documents = inputs()
    tally = Tally.of(labels, documents, Balance(sequence_loss=0.5))
    got = balance_loss(scores, experts, tally, torch.zeros(6))
    expected = torch.zeros((), dtype=torch.float64)
    for row, real in ((0, range(10)), (1, range(5))):
        own = [row * 10 + t for t in real]
        loss = torch.zeros((), dtype=torch.float64)
        for i in range(6):
            f = 6 / (2 * len(own)) * sum(int(i in experts[t]) for t in own)
            p = sum(scores[t, i] / scores[t].sum() for t in own) / len(own)
            loss = loss + f * p
        trained = int((labels[row] != IGNORED).sum())
        expected = expected + 0.5 * trained * loss
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected, scores, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(got, scores)[0], wanted, rtol=1e-10, atol=1e-14)
    assert wanted.abs().sum() > 0


def test_classic_loss_is_switch_with_the_last_steps_shares():
    scores, experts, labels, documents = inputs()
    share = torch.tensor([0.3, 0.1, 0.1, 0.2, 0.2, 0.1])
    tally = Tally.of(labels, documents, Balance(batch_loss=0.25))
    got = balance_loss(scores, experts, tally, share)
    expected = torch.zeros((), dtype=torch.float64)
    for row, real in ((0, range(10)), (1, range(5))):
        trained = int((labels[row] != IGNORED).sum())
        for i in range(6):
            p = sum(scores[row * 10 + t, i] / scores[row * 10 + t].sum() for t in real) / len(real)
            expected = expected + 0.25 * trained * 6 * share[i].double() * p
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_nothing_asked_nothing_computed():
    scores, experts, labels, documents = inputs()
    assert balance_loss(scores, experts, Tally.of(labels, documents, Balance()), torch.zeros(6)) is None


def test_tokens_of_untrained_documents_do_not_count():
    _, _, labels, documents = inputs()
    tally = Tally.of(labels, documents, Balance())
    assert tally.counted.tolist() == [[True] * 10, [True] * 5 + [False] * 5]
    whole_rows = Tally.of(labels, None, Balance())
    assert whole_rows.counted.tolist() == [[True] * 10, [True] * 10]


def test_document_numbers():
    found = document_numbers(torch.tensor([0, 3, 3, 5]), 6, torch.device("cpu"))
    assert found.tolist() == [0, 0, 0, 2, 2, 3]


def moe(seed=0):
    torch.manual_seed(seed)
    spec = MoE(6, 2, 8, 1, Gate("sigmoid", bias=True, normalize=True, scale=2.0))
    block = MixtureOfExperts(spec, 16)
    for p in block.parameters():
        torch.nn.init.normal_(p, 0, 0.3)
    return block


def test_bias_moves_towards_balance_by_the_sign():
    """arXiv 2408.15664, algorithm 1: b_i += u * sign(mean load - load of i)."""
    block = moe()
    balancer = Balancer(block)
    load = balancer.update(torch.tensor([[10.0, 2.0, 4.0, 4.0, 4.0, 0.0]], dtype=torch.float64), 0.01)
    expected = torch.tensor([-0.01, 0.01, 0.0, 0.0, 0.0, 0.01])
    torch.testing.assert_close(block.gate.e_score_correction_bias, expected)
    assert (load.worst, load.idle, load.choices) == (pytest.approx(2.5), 1, 24)
    balancer.update(torch.zeros(1, 6, dtype=torch.float64), 0.01)  # a step that trained nothing moves nothing
    torch.testing.assert_close(block.gate.e_score_correction_bias, expected)


def test_the_bias_chooses_and_does_not_weigh():
    block = moe()
    x = torch.randn(5, 16)
    _, _, before = block.gate(x)
    with torch.no_grad():
        block.gate.e_score_correction_bias[3] = 10.0
    weights, experts, scores = block.gate(x)
    assert (experts == 3).any(1).all()
    torch.testing.assert_close(scores, before)
    chosen = scores.gather(1, experts)
    torch.testing.assert_close(weights, 2.0 * chosen / chosen.sum(1, keepdim=True))


def test_a_biased_run_becomes_balanced():
    """From a router that sends nearly all tokens to two experts, the bias alone evens the load out."""
    block = moe()
    with torch.no_grad():
        block.gate.weight[:2] += 0.3
    balancer = Balancer(block)
    x = torch.randn(512, 16) + 0.5
    labels = torch.zeros(1, 512, dtype=torch.int64)
    loads = []
    for _ in range(150):
        tally = Tally.of(labels, None, Balance())
        out, _ = block(x[None].requires_grad_(), tally)
        out.sum().backward()
        loads.append(balancer.update(balancer.counts(), 0.005).worst)
    assert loads[0] > 2.0
    assert loads[-1] < 1.15
