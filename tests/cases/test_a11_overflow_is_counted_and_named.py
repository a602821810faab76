"""A11: skipped steps are counted and shown; one bad batch is survived; K in a row stop the run and name the rows.

fp16 itself runs on cards only (DeepSpeed refuses it on a CPU, and so do we, with a sentence). Here DeepSpeed skips
real NaN steps in fp32 and bf16, and the loop is shown the overflows of loss scaling by a stand-in engine.
"""

from __future__ import annotations

import math

import pytest
import torch

from tercet.engine import StepResult
from tercet.engine.deepspeed.config import deepspeed_config
from tercet.errors import NotLegalError, TercetError
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.loops import loop_of
from tests.tiny import micro_batches, tiny_model, whole_weights

ROWS, LIMIT, STEPS = 6, 3, 7
ALONE = World(0, 1, 0, torch.device("cpu"))


class Batches:
    """Steps in `bad` make rank 1's hidden states infinite, as one row of garbage would."""

    def __init__(self, engine, bad: set[int]):
        self.engine, self.bad = engine, bad

    def micro_batches(self, step, *, rank, ranks, micro_batch):
        self.engine.module.poison = step in self.bad and rank == 1
        return micro_batches(step, rank, ranks, micro_batch, ROWS)


def train(world: World, name: str, precision: str, bad: set[int]):
    engine = engine_of(world, layout(name, world.size, ROWS), ROWS, precision)
    engine.module.poison = False
    engine.module.model.norm.register_forward_hook(
        lambda m, i, out: out * float("inf") if engine.module.poison else out
    )
    loop = loop_of(world, engine, Batches(engine, bad), STEPS, nonfinite="skip", nonfinite_limit=LIMIT)
    message = None
    before = None
    try:
        while loop.progress.step < STEPS:
            loop._step()
            if loop.progress.step == 2:
                before = whole_weights(engine)
    except TercetError as error:
        message = str(error)
    return message, loop.progress.step, loop.progress.updates, before, whole_weights(engine)


@needs_deepspeed
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("zero0", "fp32"),
        ("zero1", "bf16"),
        ("zero2", "fp32"),
        ("zero3", "bf16"),
        pytest.param("zero2-cpu", "bf16", marks=pytest.mark.slow),
    ],
)
def test_every_step_bad_stops_after_k_and_names_the_rows(pools, name, precision):
    for message, step, updates, before, after in pools[2].run(train, name, precision, {2, 3, 4, 5, 6}):
        assert (step, updates) == (2 + LIMIT, 2)
        assert f"{LIMIT} steps in a row were skipped" in message
        assert "rank 1, rows 1, 3, 5" in message and "rank 0" not in message
        for key, tensor in before.items():
            assert torch.equal(after[key], tensor), f"{key} changed in a skipped step"


@needs_deepspeed
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_one_bad_step_is_survived(pools, name):
    for message, step, updates, _, after in pools[2].run(train, name, "bf16", {3}):
        assert message is None
        assert (step, updates) == (STEPS, STEPS - 1)
        assert all(torch.isfinite(t).all() for t in after.values())


class Overflowing:
    """A stand-in for an fp16 engine: the loss is finite, the scaled gradients overflow in the steps `bad`."""

    def __init__(self, bad: set[int]):
        self.bad, self.scale, self.calls, self.rates = bad, 2.0**16, 0, []
        self.module = torch.nn.Module()

    def step(self, batches, lr, terms=None, between=None):
        self.calls += 1
        if self.calls in self.bad:
            self.scale /= 2
            return StepResult(1.0, math.nan, 8, updated=False, loss_scale=self.scale)
        self.rates.append(lr)
        return StepResult(1.0, 1.0, 8, loss_scale=self.scale)

    def evaluate(self, batch):
        return 1.0, 8

    def culprits(self, batches):
        return []


def test_overflows_that_find_the_scale_do_not_stop_a_run():
    engine = Overflowing({1, 2, 5})
    loop = loop_of(
        ALONE, engine, Batches(engine, set()), STEPS, nonfinite_limit=LIMIT
    )  # nonfinite is stop: that is for losses
    while loop.progress.step < STEPS:
        loop._step()
    assert (loop.progress.updates, loop.progress.skipped_in_a_row) == (STEPS - 3, 0)
    assert len(engine.rates) == STEPS - 3


def test_a_scale_that_only_falls_stops_the_run():
    engine = Overflowing(set(range(1, 20)))
    loop = loop_of(ALONE, engine, Batches(engine, set()), STEPS, nonfinite_limit=LIMIT)
    with pytest.raises(TercetError, match="3 steps in a row were skipped") as caught:  # noqa: PT012
        while True:
            loop._step()
    assert "loss scale now 8192" in str(caught.value) and "step 3" in str(caught.value)
    assert "bf16" in str(caught.value)


def test_fp16_is_written_as_json_and_refused_on_a_cpu():
    strategy = layout("zero2", 3, 12)
    config = deepspeed_config(tiny_model(), strategy, OptimSection(), "fp16", 12, on_card=True)
    assert config["fp16"] == {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 1,
        "min_loss_scale": 1,
    }
    assert config["bf16"]["enabled"] is False
    with pytest.raises(NotLegalError, match="no fp16 on a CPU"):
        engine_of(ALONE, layout("zero2", 1, 12), 12, "fp16")
