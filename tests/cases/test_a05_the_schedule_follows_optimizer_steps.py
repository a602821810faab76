"""A05: the learning rate at step s is a closed formula of s alone, whatever the ranks and the accumulation."""

from __future__ import annotations

import math

import pytest

from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection
from tercet.spec.run_folder import RunFolder
from tercet.training.schedule import learning_rate
from tests.loops import Dealt, loop_of, recorder_of
from tests.tiny import tiny_engine, tiny_strategy

ROWS, STEPS, WARMUP, LR = 12, 12, 4, 1e-3


def closed(schedule: str, s: int, low: float = 0.1) -> float:
    if s < WARMUP:
        return LR * (s + 1) / WARMUP
    t = (s - WARMUP) / (STEPS - WARMUP)
    return (
        LR
        * {
            "constant": 1.0,
            "linear": 1 - (1 - low) * t,
            "cosine": low + (1 - low) * 0.5 * (1 + math.cos(math.pi * t)),
            "wsd": 1.0 if s < STEPS - 2 else 1 - (1 - low) * (s - (STEPS - 2) + 1) / 2,
        }[schedule]
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_closed_formula(schedule):
    optim = OptimSection(lr=LR, schedule=schedule, warmup_steps=WARMUP, min_lr_ratio=0.1)
    rates = [learning_rate(optim, s, STEPS) for s in range(STEPS)]
    assert rates == pytest.approx([closed(schedule, s) for s in range(STEPS)])
    assert rates[WARMUP - 1] == pytest.approx(LR)


def train(world: World, precision: str, micro: int, overflows: bool, folder):
    """Twelve real steps; in fp16 the first scale may overflow, so that some are skipped. Return the optimizer's rates."""
    engine = tiny_engine(world, tiny_strategy("ddp", world.size, ROWS, micro), precision)
    if overflows:
        engine._scaler.scale = 2.0**26
    record = recorder_of(world, folder, STEPS)
    optim = OptimSection(lr=LR, warmup_steps=WARMUP, min_lr_ratio=0.1)
    loop = loop_of(world, engine, Dealt(ROWS), STEPS, micro_batch=micro, record=record, optim=optim)
    used = []
    for _ in range(STEPS):
        before = loop.progress.updates
        loop._step()
        used.append(engine.optimizer.param_groups[0]["lr"] if loop.progress.updates > before else None)
    if record is not None:
        record.close()
    return used


@pytest.mark.parametrize(("size", "micro"), [(1, 12), (1, 3), (2, 6), (3, 1)])
def test_ranks_and_accumulation_do_not_move_it(pools, tmp_path, size, micro):
    expected = [closed("cosine", s) for s in range(STEPS)]
    for used in pools[size].run(train, "fp32", micro, False, tmp_path):
        assert used == pytest.approx(expected)
    logged = [e["lr"] for e in RunFolder(tmp_path).read_events() if e["event"] == "step"]
    assert logged == pytest.approx(expected)


@pytest.mark.parametrize(("size", "micro"), [(1, 3), (3, 2)])
def test_steps_that_fp16_skips_do_not_move_it(pools, tmp_path, size, micro):
    for used in pools[size].run(train, "fp16", micro, True, tmp_path):
        rates = [lr for lr in used if lr is not None]
        skipped = len(used) - len(rates)
        assert 0 < skipped < STEPS - WARMUP and used[:skipped] == [None] * skipped
        assert rates == pytest.approx([closed("cosine", s) for s in range(len(rates))])
