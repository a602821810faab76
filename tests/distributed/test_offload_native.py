"""The native engine with optimizer or weights on the host: the same numbers, and resuming bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tercet.engine import EngineSetup
from tercet.engine.native import NativeEngine
from tercet.errors import NotLegalError
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection
from tercet.spec.strategy import Work, why_not
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

ROWS, STEPS = 7, 4
OPTIMIZER, WEIGHTS = {"offload": {"optimizer": "cpu"}}, {"offload": {"weights": "cpu"}}


def train(world: World, word: str, micro: int, precision: str, keys: dict, folder=None):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, micro, **keys), precision)
    results = []
    for step in range(STEPS):
        r = engine.step(micro_batches(step, world.rank, world.size, micro, ROWS), 1e-2)
        results.append((r.loss, r.grad_norm))
        if folder is not None and step == 1:
            engine.save(folder).wait()
            world.barrier()
    return results, whole_weights(engine)


def resume(world: World, word: str, precision: str, keys: dict, folder):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1, **keys), precision)
    engine.load(folder)
    losses = []
    for step in range(2, STEPS):
        losses.append(engine.step(micro_batches(step, world.rank, world.size, 1, ROWS), 1e-2).loss)
    return losses, whole_weights(engine)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    ("word", "size", "keys"),
    [("single", 1, OPTIMIZER), ("ddp", 2, OPTIMIZER), ("zero2", 3, OPTIMIZER), ("zero3", 3, WEIGHTS)],
)
def test_offload_moves_no_number(pools, precision, word, size, keys):
    expected, weights = pools[size].run(train, word, 1, precision, {})[0]
    for got, got_weights in pools[size].run(train, word, 1, precision, keys):
        assert got == [pytest.approx(pair, rel=1e-6) for pair in expected]
        for name, tensor in weights.items():
            torch.testing.assert_close(got_weights[name], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("word", "size", "keys"), [("single", 1, OPTIMIZER), ("zero3", 3, OPTIMIZER)])
def test_resume_is_bit_for_bit(pools, tmp_path, word, size, keys):
    expected, weights = pools[size].run(train, word, 1, "bf16", keys, tmp_path)[0]
    losses, got = pools[size].run(resume, word, "bf16", keys, tmp_path)[0]
    assert losses == [loss for loss, _ in expected[2:]]
    for name, tensor in weights.items():
        assert torch.equal(got[name], tensor), name


class Moves(TorchDispatchMode):
    """Notes the formats of all that is brought to a device which stands for the card."""

    def __init__(self, card: torch.device):
        super().__init__()
        self.card, self.seen = card, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        moved = function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if moved and isinstance(out, torch.Tensor) and out.device.type == self.card.type:
            self.seen.add(out.dtype)
        return out


@pytest.mark.parametrize("given", [False, True])
def test_the_card_never_holds_the_fp32_model(given):
    """Not even while it is built: tensor by tensor, fp32 stays on the host and a bf16 copy goes to the card."""
    card, model = torch.device("meta"), tiny_model()
    files = SimpleNamespace(tensor=lambda name: torch.ones({t.name: t.shape for t in model.tensors()}[name]))
    section, strategy = OptimSection(), tiny_strategy("single", 1, ROWS, **OPTIMIZER)
    with Moves(card) as moved:
        world = World(0, 1, 0, card)
        weights = files if given else None
        engine = NativeEngine(EngineSetup(model, strategy, section, "bf16", world, seed=7, weights=weights))
    assert moved.seen == {torch.bfloat16}
    assert {(p.device.type, p.dtype) for p in engine.module.parameters()} == {("meta", torch.bfloat16)}
    assert {part.value.device.type for part in engine.layout.parts} == {"cpu"}


def test_weights_on_the_host_need_shards():
    strategy = tiny_strategy("single", 1, ROWS, 1, **WEIGHTS)
    why = why_not(tiny_model(), strategy, Work(16, ROWS))
    assert any("strategy.offload.optimizer=cpu works without" in sentence for sentence in why)
    assert NotLegalError(why).exit_code == 3
