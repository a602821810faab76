"""A05: the learning rate at step s is a closed formula of s alone, whatever the ranks and the accumulation."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tercet.parallel.world import World
from tercet.spec.model import Balance
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.spec.run_folder import RunFolder
from tercet.training.schedule import further_terms, learning_rate
from tests.loops import Dealt, loop_of, recorder_of
from tests.tiny import tiny_engine, tiny_model, tiny_strategy

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


def test_what_is_learnt_besides_follows_optimizer_steps_too():
    """DeepSeek-V3 (arXiv 2412.19437, 4.2): the bias moves until 14.3 of 14.8 T tokens, further predictions weigh 0.3
    for the first 10 T and 0.1 from there on. Here of 148 steps."""
    section = TrainSection.model_validate(
        {"balance": {"bias_until": 14.3 / 14.8, "sequence_loss": 0.0001}, "mtp": {"late_after": 10 / 14.8}}
    )
    model = replace(tiny_model(), balance=Balance(bias_speed=0.001, batch_loss=0.5))
    terms = [further_terms(section, model, step, 148) for step in range(148)]
    assert [t.balance.bias_speed for t in terms] == [0.001] * 143 + [0.0] * 5
    assert [t.mtp_weight for t in terms] == [0.3] * 100 + [0.1] * 48
    assert {(t.balance.sequence_loss, t.balance.batch_loss) for t in terms} == {(0.0001, 0.5)}
    still = further_terms(TrainSection.model_validate({"balance": {"bias_speed": 0.0}}), model, 0, 148)
    assert still.balance.bias_speed == 0.0
    assert further_terms(TrainSection(), model, 147, 148).balance.bias_speed == 0.001  # to the end, unless asked


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
