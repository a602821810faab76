"""A13: each trained token counts once, over ranks and micro-batches; the bias moves once a step, not in evaluation."""

from __future__ import annotations

import pytest
import torch

from tercet.engine import Terms
from tercet.spec.model import Balance
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import global_batch, micro_batches, tiny_engine, tiny_strategy

ROWS, STEPS, SPEED = 8, 5, 0.01
TERMS = Terms(Balance(bias_speed=SPEED), mtp_weight=0.3)


def biases_after(world, word, micro, keys):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro, **keys), model=tiny_deepseek())
    choices = []
    for step in range(STEPS):
        batches = micro_batches(step, world.rank, world.size, micro, ROWS)
        choices.append(engine.step(batches, 1e-3, TERMS).load["expert_choices"])
    before = {name: bias.clone() for name, bias in engine.balancer.biases().items()}
    for batch in micro_batches(50, world.rank, world.size, micro, ROWS):
        engine.evaluate(batch)
    engine.module.train()
    for batch in micro_batches(51, world.rank, world.size, micro, ROWS):  # a dry forward: no backward follows
        engine.module(batch.input_ids, positions=batch.positions, documents=batch.documents, labels=batch.labels)
    assert not engine.balancer.counts().any()
    for name, bias in engine.balancer.biases().items():
        assert torch.equal(bias, before[name])
    return before, choices


@pytest.fixture(scope="module")
def alone(pools):
    return pools[1].run(biases_after, "single", ROWS, {})[0]


@pytest.mark.parametrize(
    ("size", "word", "micro", "keys"),
    [
        (1, "single", 2, {}),
        (1, "single", ROWS, {"recompute": "full"}),
        (1, "single", 2, {"recompute": "selective"}),
        (2, "ddp", 4, {}),
        (2, "ddp", 1, {"recompute": "full"}),
        (2, "zero3", 1, {"recompute": "full"}),
        (3, "zero2", 1, {}),
    ],
)
def test_same_bias_under_every_layout(pools, alone, size, word, micro, keys):
    for biases, choices in pools[size].run(biases_after, word, micro, keys):
        assert choices == alone[1]
        for name, bias in alone[0].items():
            torch.testing.assert_close(biases[name], bias, rtol=0, atol=1e-6)


def test_the_bias_moves_by_whole_steps(alone):
    moved = torch.cat(list(alone[0].values()))
    assert moved.abs().max() > 0
    in_steps = moved / SPEED
    torch.testing.assert_close(in_steps, in_steps.round(), rtol=0, atol=1e-4)
    assert in_steps.abs().max() <= STEPS


def test_choices_are_trained_tokens_times_experts_times_layers(alone):
    for step, choices in enumerate(alone[1]):
        labels = global_batch(step, ROWS)[1]
        labels[:, 7] = -100  # the border between a row's two documents
        documents = labels.view(ROWS, 2, 8)
        tokens = 8 * int((documents != -100).any(-1).sum())  # every token of a document that trains something
        assert choices == tokens * 2 * 2  # two experts, in layer 2 and in the further prediction
