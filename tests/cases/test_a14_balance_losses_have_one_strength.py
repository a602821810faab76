"""A14: a balance loss's gradient is the same for any ranks, accumulation and micro-batch size; padding has none."""

from __future__ import annotations

import pytest
import torch

from tercet.engine import Terms
from tercet.spec.model import Balance
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_strategy

ROWS = 8
LOSSES = {"sequence": Balance(sequence_loss=0.1), "batch": Balance(batch_loss=0.1)}


def router_gradients(world, word, micro, keys, balance):
    """Return (name, first row, gradient rows) of every router, the main loss switched off by a head of zeros.

    Two steps that change nothing (rate 0): the classic loss needs the shares of a first one. Adam's first moment
    is then a fixed combination of both gradients.
    """
    strategy = tiny_strategy(word, world.size, ROWS, micro, **keys)
    engine = tiny_engine(world, strategy, model=tiny_deepseek(), clip="none")
    for part in engine.layout.parts:
        if part.name == "lm_head.weight":
            part.value.zero_()
    engine.layout.after_update()
    for step in range(2):
        batches = micro_batches(step, world.rank, world.size, micro, ROWS)
        engine.step(batches, 0.0, Terms(balance, mtp_weight=0.3))
    return [
        (p.name, p.region.begin, engine.optimizer.state[p.value]["exp_avg"].clone())
        for p in engine.layout.parts
        if p.description.kind == "router"
    ]


def whole(results):
    """Join the rows that the ranks hold; replicas agree, so the first rank's is taken."""
    found: dict[str, torch.Tensor] = {}
    for name, begin, rows in (item for rank in results for item in rank):
        found.setdefault(name, torch.zeros(8, 32))[begin : begin + len(rows)] = rows
    return found


@pytest.fixture(scope="module")
def alone(pools):
    return {name: whole(pools[1].run(router_gradients, "single", ROWS, {}, b)) for name, b in LOSSES.items()}


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize(
    ("size", "word", "micro", "keys"),
    [
        (1, "single", 2, {}),
        (1, "single", 1, {"recompute": "full"}),
        (2, "ddp", 4, {}),
        (2, "ddp", 1, {}),
        (2, "zero3", 2, {}),
        (3, "zero1", 1, {}),
    ],
)
def test_same_gradient_under_every_layout(pools, alone, loss, size, word, micro, keys):
    got = whole(pools[size].run(router_gradients, word, micro, keys, LOSSES[loss]))
    for name, gradient in alone[loss].items():
        assert gradient.abs().max() > 1e-6
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_padding_has_no_say(pools, alone, loss):
    """Micro-batches of five leave two places of ten without a row: tokens that train nothing."""
    got = whole(pools[1].run(router_gradients, "single", 5, {}, LOSSES[loss]))
    for name, gradient in alone[loss].items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-8)


def test_twice_the_weight_twice_the_gradient(pools, alone):
    got = whole(pools[1].run(router_gradients, "single", ROWS, {}, Balance(sequence_loss=0.2)))
    for name, gradient in alone["sequence"].items():
        torch.testing.assert_close(got[name], 2 * gradient, rtol=1e-4, atol=1e-8)
