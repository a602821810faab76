"""G50: a finite loss with a gradient that is not: parameter, rank and rows are named, those alone; nothing changes."""

from __future__ import annotations

import pytest
import torch

from tercet.errors import TercetError
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.training.loop import Loop, Progress
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import STRATEGIES, global_batch, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, MICRO, STEPS, BAD_STEP, BAD_ROW = 12, 2, 4, 2, 9  # row 9 is the second in rank 1's second micro-batch


class Batches:
    def micro_batches(self, step, *, rank, ranks, micro_batch):
        return micro_batches(step, rank, ranks, micro_batch, ROWS)


class Recorded:
    """What the recorder is told of skipped steps."""

    def __init__(self):
        self.said, self.events = [], []

    def event(self, kind, **fields):
        self.events.append(fields)

    def say(self, text):
        self.said.append(text)

    def step(self, *_, **__):
        pass


def poison_row(module: torch.nn.Module, layer: str) -> None:
    """Make what flows back into one layer NaN in the bad row of the bad step, wherever that row is computed."""
    bad = global_batch(BAD_STEP, ROWS)[0][BAD_ROW]
    here: dict[str, torch.Tensor] = {}

    def note(part, given):
        here["mask"] = (given[0] == bad).all(1)

    def poisoned(part, given, out):
        mask = here["mask"]
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad and mask.any():
            first.register_hook(lambda g: g.masked_fill(mask.view(-1, *[1] * (g.dim() - 1)), torch.nan))

    module.register_forward_pre_hook(note)
    module.get_submodule(layer).register_forward_hook(poisoned)


def loop_of(engine, world, policy: str) -> Loop:
    return Loop(
        engine,
        Batches(),
        world,
        None,
        Recorded(),  # type: ignore[arg-type]
        TrainSection(nonfinite=policy),
        OptimSection(lr=1e-2, schedule="constant"),
        total_steps=STEPS,
        micro_batch=MICRO,
        checkpoint_every=0,
        progress=Progress(),
        stop_requested=lambda: False,
        state={},
        has_validation=False,
    )


def train(world: World, word: str, policy: str, leave_out: bool = False, deepspeed: bool = False):
    if deepspeed:
        engine = engine_of(world, layout(word, world.size, ROWS, MICRO), ROWS)
    else:
        engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, MICRO))
    poison_row(engine.module, "model.layers.1.mlp")
    loop, message = loop_of(engine, world, policy), None
    try:
        while loop.progress.step < STEPS:
            if leave_out and loop.progress.step == BAD_STEP:
                loop.progress.step += 1
                engine.steps_done += 1
                continue
            loop._step()
    except TercetError as error:
        message = str(error)
    return message, loop.progress.updates, loop.record, whole_weights(engine)  # type: ignore[arg-type]


def check(found, without, rows: str) -> None:
    for (message, updates, record, weights), (_, _, _, expected) in zip(found, without, strict=True):
        assert (message, updates) == (None, STEPS - 1)
        assert [e["step"] for e in record.events] == [BAD_STEP + 1]
        where = record.events[0]["where"]
        assert where.startswith(f"rank 1, rows {rows}: the gradient of model.layers.1.mlp.down_proj.weight and ")
        assert "rank 0" not in where and "rank 2" not in where and ";" not in where
        assert f"not finite: {where}" in record.said[0] and "the step was skipped (1 so far)" in record.said[0]
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("word", STRATEGIES)
def test_the_row_alone_is_named_and_the_run_is_as_without_that_step(pools, word):
    check(pools[3].run(train, word, "skip"), pools[3].run(train, word, "skip", True), "9")


@needs_deepspeed
@pytest.mark.parametrize("word", ["zero0", "zero1", "zero2", "zero3", "zero2-cpu"])
def test_deepspeed_names_the_micro_batch_and_takes_no_step(pools, word):
    found, without = (pools[3].run(train, word, "skip", leave_out, True) for leave_out in (False, True))
    check(found, without, "8, 9")


def test_stopping_says_that_it_stopped(pools):
    for message, updates, record, _ in pools[3].run(train, "zero3", "stop"):
        assert updates == BAD_STEP
        assert "step 3: loss " in message and "rank 1, rows 9: the gradient of model.layers.1.mlp" in message
        assert "stopped before the update" in message
        assert "was skipped" not in message + "".join(record.said)


def overflowing_sum(world: World):
    engine = tiny_engine(world, tiny_strategy("ddp", world.size, ROWS, MICRO))
    engine.module.model.norm.weight.register_hook(lambda g: torch.full_like(g, 2e38))
    loop = loop_of(engine, world, "stop")
    try:
        loop._step()
    except TercetError as error:
        return str(error)
    return None


def test_a_sum_that_overflows_accuses_no_rank(pools):
    for message in pools[3].run(overflowing_sum):
        assert "not finite: the gradients of model.norm.weight, from rows 0, 1, 2," in message and "rank" not in message
