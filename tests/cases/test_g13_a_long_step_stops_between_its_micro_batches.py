"""G13: a request to stop is seen within a long step; all ranks give it up together, save, and lose only that step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.errors import InterruptedRun
from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.spec.run_folder import RunFolder
from tercet.training.checkpoint import find_checkpoint
from tercet.training.loop import Loop, Progress
from tests.cases.checkpoints import checkpoints
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, STEPS, ASKED_IN, ASKED_AT = 12, 4, 2, 1  # four micro-batches a step on each of three ranks


class Batches:
    def micro_batches(self, step, *, rank, ranks, micro_batch):
        return micro_batches(step, rank, ranks, micro_batch, ROWS)


class Asked:
    """A signal that reaches rank 1 alone, while it computes one micro-batch of one step."""

    def __init__(self, engine, world: World):
        self.forwards, self.requested, self.rank = 0, False, world.rank
        engine.module.register_forward_pre_hook(self.forward)

    def forward(self, *_):
        self.forwards += 1
        if self.rank == 1 and self.forwards == ASKED_IN * 4 + ASKED_AT + 1:
            self.requested = True


def loop_of(engine, world, folder, progress, requested, total=STEPS) -> Loop:
    return Loop(
        engine,
        Batches(),
        world,
        folder,
        None,
        TrainSection(),
        OptimSection(lr=1e-2, schedule="constant"),
        total_steps=total,
        micro_batch=1,
        checkpoint_every=0,
        progress=progress,
        stop_requested=requested,
        state={},
        has_validation=False,
    )


def made(world: World, word: str, deepspeed: bool):
    if deepspeed:
        return engine_of(world, layout(word, world.size, ROWS), ROWS)
    return tiny_engine(world, tiny_strategy(word, world.size, ROWS))


def train(world: World, word: str, folder: str, deepspeed: bool, long_seconds: float):
    import tercet.training.loop as module

    usual, module.LONG_STEP_SECONDS = module.LONG_STEP_SECONDS, long_seconds
    engine = made(world, word, deepspeed)
    asked, progress, message = Asked(engine, world), Progress(), None
    try:
        loop_of(engine, world, checkpoints(Path(folder), world), progress, lambda: asked.requested).run()
    except InterruptedRun as error:
        message = error.message
    finally:
        module.LONG_STEP_SECONDS = usual
    return message, asked.forwards, progress.step


def resumed(world: World, word: str, folder: str, deepspeed: bool):
    found = find_checkpoint(RunFolder(Path(folder)).checkpoints, world)
    assert found is not None
    engine = made(world, word, deepspeed)
    engine.load(found.folder)
    state = {k: v for k, v in found.state.items() if k in vars(Progress())}
    loop_of(engine, world, None, Progress(**state), lambda: False).run()
    return found.state["step"], whole_weights(engine)


def undisturbed(world: World, word: str, deepspeed: bool):
    engine = made(world, word, deepspeed)
    loop_of(engine, world, None, Progress(), lambda: False).run()
    return whole_weights(engine)


def check(pools, folder: Path, word: str, deepspeed: bool) -> None:
    for message, forwards, step in pools[3].run(train, word, str(folder), deepspeed, 0.0):
        assert message == f"stopped on request after step {ASKED_IN}; saved"
        # The micro-batch in which rank 1 was asked is the last that any rank computes.
        assert (forwards, step) == (ASKED_IN * 4 + ASKED_AT + 1, ASKED_IN)
    ended = pools[3].run(resumed, word, str(folder), deepspeed)
    for (step, weights), expected in zip(ended, pools[3].run(undisturbed, word, deepspeed), strict=True):
        assert step == ASKED_IN
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize("word", STRATEGIES)
def test_all_ranks_end_at_the_same_micro_batch_and_resume_bit_equal(pools, tmp_path, word):
    check(pools, tmp_path, word, False)


@needs_deepspeed
@pytest.mark.parametrize("word", ["zero2", "zero3"])
def test_deepspeed(pools, tmp_path, word):
    check(pools, tmp_path, word, True)


def test_short_steps_are_finished(pools, tmp_path):
    for message, forwards, step in pools[3].run(train, "zero2", str(tmp_path), False, 1e9):
        assert message == f"stopped on request after step {ASKED_IN + 1}; saved"
        assert (forwards, step) == (4 * (ASKED_IN + 1), ASKED_IN + 1)
