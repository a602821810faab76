"""A18: loss and norm are checked over all ranks before the update; skip or stop, all ranks alike, rows named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.errors import TercetError
from tercet.parallel.world import World
from tercet.spec.run_folder import RunFolder
from tests.loops import loop_of, recorder_of
from tests.tiny import STRATEGIES, micro_batches, tiny_engine, tiny_strategy, whole_weights

ROWS, STEPS, BAD_STEP, BAD_RANK = 6, 8, 4, 2  # the fifth step


class Batches:
    """Step BAD_STEP makes the embedding of one token NaN for one rank: its loss and gradients are NaN."""

    def __init__(self, engine):
        self.engine = engine

    def micro_batches(self, step, *, rank, ranks, micro_batch):
        batches = micro_batches(step, rank, ranks, micro_batch, ROWS)
        poison = step == BAD_STEP and rank == BAD_RANK
        self.engine.module.poison = poison
        return batches


def train(world: World, word: str, policy: str, leave_out: bool, folder: Path):
    engine = tiny_engine(world, tiny_strategy(word, world.size, ROWS, 1))
    engine.module.poison = False
    # The final norm's output becomes NaN on the poisoned rank, as one bad row would make it.
    engine.module.model.norm.register_forward_hook(
        lambda m, i, out: out * float("nan") if engine.module.poison else out
    )
    record = recorder_of(world, folder, STEPS)
    loop = loop_of(world, engine, Batches(engine), STEPS, record=record, nonfinite=policy)
    progress = loop.progress
    message = None
    try:
        while progress.step < STEPS:
            if leave_out and progress.step == BAD_STEP:
                progress.step += 1
                engine.steps_done += 1
                continue
            loop._step()
    except TercetError as error:
        message = str(error)
    if record is not None:
        record.close()
    return message, progress.step, progress.updates, whole_weights(engine)


@pytest.mark.parametrize("word", STRATEGIES)
def test_skip_equals_the_run_without_that_step(pools, tmp_path, word):
    skipped = pools[3].run(train, word, "skip", False, tmp_path)
    (event,) = (e for e in RunFolder(tmp_path).read_events() if e["event"] == "skip")
    assert (event["step"], event["loss"], event["where"]) == (BAD_STEP + 1, "nan", "rank 2, rows 2, 5")
    without = pools[3].run(train, word, "skip", True, tmp_path)
    for (message, step, updates, weights), (_, _, _, expected) in zip(skipped, without, strict=True):
        assert message is None
        assert (step, updates) == (STEPS, STEPS - 1)
        for name, tensor in expected.items():
            assert torch.equal(weights[name], tensor), name


def test_stop_ends_all_ranks_with_one_message(pools, tmp_path):
    for message, step, updates, _ in pools[3].run(train, "zero2", "stop", False, tmp_path):
        assert (step, updates) == (BAD_STEP + 1, BAD_STEP)
        assert "step 5" in message
        assert "rank 2, rows 2, 5" in message
        assert "rank 0" not in message


@pytest.mark.slow
def test_a_run_stops_before_the_update_and_says_it_once(cli):
    cli.inject("""
        import tercet.engine.native as m
        plain = m.NativeEngine.step
        def step(self, *args):
            if RANK == 2 and self.steps_done == 4:
                self.module.model.norm.register_forward_hook(lambda m, i, out: out * float("nan"))
            return plain(self, *args)
        m.NativeEngine.step = step
    """)
    done = cli.run("train", "small.yaml", "--ranks", "3", "--output", "run", "output.checkpoint_every=2", code=1)
    assert done.stderr.count("not finite") == 1
    assert "step 5: loss nan" in done.stderr and "not finite: rank 2, rows" in done.stderr
    assert "rank 0, rows" not in done.stderr and "stopped before the update" in done.stderr
    assert [e["step"] for e in cli.events("run", "step")] == [1, 2, 3, 4]
    assert [e["step"] for e in cli.events("run", "checkpoint")] == [2, 4]


@pytest.mark.slow
def test_a_run_whose_every_step_was_skipped_ends_with_words(cli):
    cli.inject("""
        import torch
        import tercet.engine.native as m
        m.square_sum = lambda parts: torch.tensor(float('nan'), dtype=torch.float64)
    """)
    done = cli.run(
        *("train", "small.yaml", "--ranks", "1", "--output", "run", "train.steps=2", "train.nonfinite=skip"),
        *("train.evaluate_every=0", "train.sample_every=0", "data.validation=none"),
    )
    assert "no train loss: every step was skipped" in done.stdout
    assert [e["step"] for e in cli.events("run", "skip")] == [1, 2]
    assert cli.events("run", "step") == []
