"""A11, A12: fp16 of the native engine. Overflows halve the scale and change nothing else, the scale and its counter
are saved, K skips in a row name the gradients and rows; the losses are fp32's within what fp16 holds.
"""

from __future__ import annotations

import pytest
import torch

from tercet.engine import scaling
from tercet.engine.scaling import FIRST, LossScale
from tercet.errors import TercetError
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.training.loop import Loop, Progress
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy, whole_weights

ROWS = 6
ALONE = World(0, 1, 0, torch.device("cpu"))


def losses(world: World, word: str, precision: str, keys: dict, steps: int):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1, **keys), precision)
    return [
        (r.loss, r.grad_norm)
        for r in (engine.step(micro_batches(n % 3, world.rank, world.size, 1, ROWS), 1e-2) for n in range(steps))
    ]


@pytest.fixture(scope="module")
def plain():
    return losses(ALONE, "single", "fp32", {}, 20)


@pytest.mark.parametrize(
    ("size", "word", "keys"),
    [
        (1, "single", {}),
        (2, "zero2", {"reduce_gradients": "once_per_step"}),
        (3, "zero3", {"recompute": "full"}),
        (3, "ddp", {"offload": {"optimizer": "cpu"}}),
    ],
)
def test_twenty_steps_equal_fp32_within_the_format(pools, plain, size, word, keys):
    for found in pools[size].run(losses, word, "fp16", keys, 20):
        for (loss, norm), (expected, expected_norm) in zip(found, plain, strict=True):
            assert loss == pytest.approx(expected, rel=2e-3)
            assert norm == pytest.approx(expected_norm, rel=2e-2)
    assert plain[-1][0] < 0.9 * plain[0][0]


def scaled(world: World, word: str, scale: float, folder):
    """Start with a scale whose gradients cannot be held in fp16; return what 12 steps did to it."""
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1), "fp16")
    engine._scaler.scale = scale
    batches = [micro_batches(n, world.rank, world.size, 1, ROWS) for n in range(12)]
    before = whole_weights(engine)
    first = engine.step(batches[0], 1e-2)
    assert not first.updated and all(torch.equal(t, before[n]) for n, t in whole_weights(engine).items())
    history = [(first.loss_scale, first.updated)]
    for n, batch in enumerate(batches[1:], 1):
        result = engine.step(batch, 1e-2)
        history.append((result.loss_scale, result.updated))
        if n == 5:
            engine.save(folder).wait()
    world.meet()
    other = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1), "fp16")
    other.load(folder)
    again = [(r.loss_scale, r.updated) for r in (other.step(batch, 1e-2) for batch in batches[6:])]
    same = all(torch.equal(t, whole_weights(other)[n]) for n, t in whole_weights(engine).items())
    return history, again, same, engine._scaler == other._scaler


@pytest.mark.parametrize(("size", "word"), [(1, "single"), (2, "ddp"), (3, "zero3")])
def test_the_scale_falls_until_it_fits_and_survives_resuming(pools, tmp_path, size, word):
    for history, again, same, scaler_same in pools[size].run(scaled, word, 2.0**26, tmp_path):
        scales = [scale for scale, _ in history]
        skipped = [n for n, (_, updated) in enumerate(history) if not updated]
        assert skipped and skipped == list(range(len(skipped)))  # the first ones, no later one
        assert scales[len(skipped) - 1] == 2.0 ** (26 - len(skipped)) == scales[-1]
        assert again == history[6:] and same and scaler_same


def test_the_scale_doubles_after_a_thousand_good_steps():
    scale = LossScale()
    for _ in range(999):
        scale.after(False)
    assert scale.scale == FIRST and scale.after(False) == 2 * FIRST and scale.good == 0
    assert scale.after(True) == FIRST


@pytest.mark.parametrize("seed", range(3))
def test_the_scale_moves_as_torchs_does(monkeypatch, seed):
    """GradScaler's own rule (`torch._amp_update_scale_`): good steps count in a row, a bad one starts the count anew."""
    monkeypatch.setattr(scaling, "GOOD_STEPS", 4)
    ours, scale, good = LossScale(), torch.tensor([FIRST]), torch.zeros(1, dtype=torch.int32)
    bad = torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.2
    for overflowed in bad:
        torch._amp_update_scale_(scale, good, overflowed.float(), 2.0, 0.5, 4)
        assert (ours.after(bool(overflowed)), ours.good) == (scale.item(), good.item())


def test_the_scale_stays_within_its_bounds(monkeypatch):
    """Beyond 2^24 a sum of the loss's own gradient leaves fp16 at once; below 1 it would make gradients smaller."""
    monkeypatch.setattr(scaling, "GOOD_STEPS", 2)
    ours = LossScale()
    assert max(ours.after(False) for _ in range(60)) == 2.0**24 == ours.scale
    assert min(ours.after(True) for _ in range(60)) == 1.0 == ours.scale


def test_a_save_of_another_precision_starts_with_the_first_scale():
    scale = LossScale(8.0, 3)
    scale.restore({"steps_done": 4})
    assert (scale.scale, scale.good) == (FIRST, 0)


def overflowing(world: World) -> tuple[str, int]:
    """Gradients overflow behind layer 0 whatever the scale; every loss is finite."""
    engine = tiny_engine(world, tiny_strategy("ddp", world.size, ROWS, 1), "fp16", tiny_model())

    def spoil(grad):
        return grad * float("inf")

    def poison(module, inputs, out):
        if out.requires_grad:
            out.register_hook(spoil)

    engine.module.model.layers["0"].register_forward_hook(poison)

    class Batches:
        def micro_batches(self, step, *, rank, ranks, micro_batch):
            return micro_batches(step, rank, ranks, micro_batch, ROWS)

    loop = Loop(
        engine,
        Batches(),
        world,
        None,
        None,
        TrainSection(nonfinite_limit=3),
        OptimSection(lr=1e-2, schedule="constant"),
        total_steps=9,
        micro_batch=1,
        checkpoint_every=0,
        progress=Progress(),
        stop_requested=lambda: False,
        state={},
        has_validation=False,
    )
    try:
        while True:
            loop._step()
    except TercetError as error:
        return str(error), loop.progress.updates


def test_what_overflows_at_every_scale_stops_and_is_named(pools):
    for message, updates in pools[2].run(overflowing):
        assert updates == 0 and "3 steps in a row were skipped" in message
        assert "loss scale now 8192" in message
        assert "model.layers.0." in message and "model.layers.1" not in message
        assert "rank 0, rows 0" in message
