"""Blocks first and micro-batches first give the same losses, gradients and weights."""

from __future__ import annotations

import pytest
import torch
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_model, whole_weights

from tercet.engine import Terms
from tercet.parallel.world import World
from tercet.spec.model import Balance
from tercet.spec.strategy import Strategy

ROWS = 6
TERMS = Terms(Balance(bias_speed=0.01, sequence_loss=0.1, batch_loss=0.1), mtp_weight=0.5)
MODELS = {
    "dense": lambda: tiny_model(layers=3),
    "tied": lambda: tiny_model(layers=3, tied=True),
    "experts": lambda: tiny_deepseek(layers=3, mtp_depth=0),
    "further predictions": lambda: tiny_deepseek(layers=3),
}


def train(world: World, kind: str, engine_name: str, micro: int):
    """Return (results of three steps, gradients of the last, weights, state of the gates, order of blocks)."""
    engine = tiny_engine(world, Strategy(engine=engine_name, micro_batch=micro), model=MODELS[kind]())
    order: list[str] = []
    for name, layer in engine.module.model.layers.items():
        layer.register_forward_hook(lambda *_, name=name: order.append(name))
    results = [engine.step(micro_batches(s, 0, 1, micro, ROWS), 1e-2, TERMS) for s in range(3)]
    weights = whole_weights(engine)  # completes what is pending
    grads = {part.name: part.value.grad.clone() for part in engine.layout.parts}
    return results, grads, weights, dict(engine.balancer.state()), order


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("kind", MODELS)
def test_the_order_of_work_changes_no_number(pools, kind, accumulation):
    micro = ROWS // accumulation
    (expected,) = pools[1].run(train, kind, "native", micro)
    (found,) = pools[1].run(train, kind, "host", micro)
    assert found[4] != expected[4] and found[4][:accumulation] == ["0"] * accumulation  # another order it was
    for got, wanted in zip(found[0], expected[0], strict=True):
        assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
        assert got.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
        assert got.expert_counts == wanted.expert_counts
    for of_found, of_expected in zip(found[1:4], expected[1:4], strict=True):
        assert of_found.keys() == of_expected.keys()
        for name, tensor in of_expected.items():
            torch.testing.assert_close(of_found[name], tensor, rtol=1e-6, atol=1e-6, msg=name)
