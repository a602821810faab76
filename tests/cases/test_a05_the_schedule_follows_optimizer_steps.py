"""A05: the learning rate at step s is a closed formula of s alone, whatever the ranks and the accumulation."""

from __future__ import annotations

import math

import pytest

from tercet.engine import StepResult
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.training.loop import Loop, Progress
from tercet.training.schedule import learning_rate

STEPS, WARMUP, LR = 12, 4, 1e-3


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


class FakeEngine:
    """Counts what the loop hands over; the loop must not know whether it is real."""

    def __init__(self, skip: set[int] = frozenset()):
        self.rates: list[float] = []
        self.calls = 0
        self._skip = skip

    def step(self, micro_batches, lr, terms=None):
        self.calls += 1
        if self.calls in self._skip:
            return StepResult(math.nan, math.nan, 1, updated=False)
        self.rates.append(lr)
        return StepResult(1.0, 1.0, 1)

    def evaluate(self, batch):
        return math.nan, 1


class FakeBatches:
    def __init__(self, accumulation: int):
        self.accumulation = accumulation

    def micro_batches(self, step, *, rank, ranks, micro_batch):
        class Batch:
            rows = [step]  # noqa: RUF012

        return [Batch() for _ in range(self.accumulation)]


class FakeCheckpoints:
    last_step = -1

    def save(self, engine, state):
        self.last_step = state["step"]

    def writing(self):
        return False

    def finish(self):
        return True


def run(accumulation: int, skip: set[int] = frozenset()) -> FakeEngine:
    import torch

    engine = FakeEngine(skip)
    Loop(
        engine,
        FakeBatches(accumulation),
        World(0, 1, 0, torch.device("cpu")),
        FakeCheckpoints(),
        None,
        TrainSection(nonfinite="skip"),
        OptimSection(lr=LR, warmup_steps=WARMUP, min_lr_ratio=0.1),
        total_steps=STEPS,
        micro_batch=1,
        checkpoint_every=0,
        progress=Progress(),
        stop_requested=lambda: False,
        state={},
        has_validation=False,
    ).run()
    return engine


def test_accumulation_does_not_move_it():
    assert run(1).rates == run(4).rates == pytest.approx([closed("cosine", s) for s in range(STEPS)])


def test_a_skipped_step_does_not_move_it():
    assert run(1, skip={3}).rates == pytest.approx([closed("cosine", s) for s in range(STEPS - 1)])
