"""A07: the model learns the next token: not the current one, not the one after the next."""

from __future__ import annotations

import numpy as np
import torch

from tercet.data.loader import make_batch
from tercet.model.objective import next_token_loss
from tercet.parallel.world import World
from tests.tiny import TinyBatch, tiny_engine, tiny_strategy

CYCLE = [5, 9, 2]  # a b c a b c …


def test_a_cycle_is_continued_exactly():
    tokens = 15
    world = World(0, 1, 0, torch.device("cpu"))
    engine = tiny_engine(world, tiny_strategy("single", 1, 3, 3, tokens))
    ids = torch.tensor([[CYCLE[(start + t) % 3] for t in range(tokens)] for start in range(3)])
    labels = torch.tensor([[CYCLE[(start + t + 1) % 3] for t in range(tokens)] for start in range(3)])
    positions = torch.arange(tokens).expand(3, -1)
    batch = TinyBatch(ids, labels, positions, torch.tensor([0, 15, 30, 45]).int(), [0, 1, 2])
    for _ in range(200):
        loss = engine.step([batch], 3e-3).loss
    assert loss < 0.05
    assert engine.generate([[5], [9, 2], [2]], 7) == [
        [9, 2, 5, 9, 2, 5, 9],
        [5, 9, 2, 5, 9, 2, 5],
        [5, 9, 2, 5, 9, 2, 5],
    ]


def test_the_chunked_loss_is_cross_entropy(monkeypatch):
    """Loss and both gradients, over several chunks, against a float64 cross-entropy."""
    monkeypatch.setattr("tercet.model.objective.CHUNK_TOKENS", 5)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(23, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 23, (2, 9), generator=generator)
    labels[0, 2:5] = -100
    plain = torch.nn.functional.cross_entropy(
        (hidden @ head.T).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    expected = torch.autograd.grad(plain * 0.37, (hidden, head))
    loss = next_token_loss(hidden, head, labels)
    torch.testing.assert_close(loss, plain)
    for got, wanted in zip(torch.autograd.grad(loss * 0.37, (hidden, head)), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_nothing_trained_gives_zero_and_zero_gradients():
    hidden = torch.randn(1, 4, 8, requires_grad=True)
    head = torch.randn(11, 8, requires_grad=True)
    loss = next_token_loss(hidden, head, torch.full((1, 4), -100))
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not head.grad.any()


class OneRow:
    """Two documents, of three tokens and of two; what each token counts as a label."""

    def row(self, index):
        return np.array([5, 6, 7, 8, 9]), np.array([3, 2])

    def trained(self, index):
        return np.array([1.0, 0.5, 2.0, 4.0, 0.25], np.float32)


def test_weights_are_shifted_with_their_labels():
    batch = make_batch([0], lambda number: (OneRow(), 0), 7, 0, True)
    assert batch.labels.tolist() == [[6, 7, -100, 9, -100, -100, -100]]
    weights = dict(zip(batch.labels[0].tolist(), batch.weights[0].tolist(), strict=True))
    assert {label: weights[label] for label in (6, 7, 9)} == {6: 0.5, 7: 2.0, 9: 0.25}
    assert (batch.trained_tokens, batch.trained_weight) == (3, 2.75)
