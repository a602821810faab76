"""What stands around a run does not end it: sensors that fall silent, a full log, a damaged save, one rank's samples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.cases.checkpoints import ALONE, SmallEngine

from tercet.parallel.world import World
from tercet.spec.recipe import OptimSection, TrainSection
from tercet.spec.run_folder import RunFolder
from tercet.training.cards import LOOKS_UNTIL_LOST, CardWatch
from tercet.training.checkpoint import Checkpoints, find_checkpoint, steps_in
from tercet.training.disk import Disk
from tercet.training.loop import Loop, Progress
from tercet.training.rank import _log_stream

ROWS = {"0": {"index": "0", "name": "RTX 4090", "pci.bus_id": "00000000:01:00.0"}}


@pytest.mark.parametrize(
    ("complaint", "lost"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch", False),
        ("nvidia-smi: TimeoutExpired", False),
        ("Unable to determine the device handle for GPU 00000000:01:00.0: Unknown Error", True),
    ],
)
def test_silence_of_the_tool_is_not_a_lost_card(tmp_path, complaint, lost):
    said: list[str] = []
    watch = CardWatch(RunFolder(tmp_path), 1, said.append)
    watch._known = ROWS
    for _ in range(LOOKS_UNTIL_LOST + 1):
        watch._find_missing([], complaint)
    assert bool(watch.lost) == lost
    assert lost or (len(said) == 1 and "training goes on" in said[0])


def test_a_log_on_a_full_disk_ends_nothing():
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = _log_stream(descriptor)
        for _ in range(3):
            print("x" * 20_000, file=stream, flush=True)
        stream.close()
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_newer_save_pushes_out_no_good_one(tmp_path: Path, keep: int):
    run = RunFolder(tmp_path)

    def checkpoints(last_step: int) -> Checkpoints:
        disk = Disk(run, ALONE, "stop", lambda text: None, lambda: False)
        return Checkpoints(run, ALONE, disk, keep, 1, last_step=last_step)

    first = checkpoints(-1)
    for step in (10, 20, 21)[: keep + 1]:
        first.save(SmallEngine(), {"step": step, "validation_loss": None})
    newest = [folder for _, folder in steps_in(run.checkpoints)]
    for folder in newest[:keep]:  # as many damaged ones as are kept
        (folder / "rank-0.safetensors").write_bytes(b"damaged")
    (run.checkpoints / "step-000010").mkdir(exist_ok=True)
    later = checkpoints(10)
    for step in (12, 14):
        later.save(SmallEngine(), {"step": step, "validation_loss": None})
    found = find_checkpoint(run.checkpoints)
    assert found is not None and found.state["step"] == 14


class Meeting:
    """A stand-in for checkpoints whose amend() is a meeting of all ranks, as the real one's is."""

    def __init__(self, world: World):
        self.world, self.known = world, {}

    def amend(self, step: int, **known) -> None:
        self.world.meet()
        self.known.update(known)


def samples_that_fail(world: World, failing: int) -> tuple[list, dict, int]:
    def sample(step: int) -> None:
        if world.rank == failing:
            raise torch.OutOfMemoryError("one card is fuller")

    meeting = Meeting(world)
    loop = Loop(
        None,
        None,
        world,
        meeting,
        None,
        TrainSection(),
        OptimSection(),
        total_steps=1,
        micro_batch=1,
        checkpoint_every=0,
        progress=Progress(step=1),
        stop_requested=lambda: False,
        state={},
        sample=sample,
        has_validation=False,
    )
    loop._after_save()
    return loop.failed, meeting.known, len(world.gather(world.rank))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_samples_that_fail_on_one_rank_keep_the_ranks_in_step(pools, failing):
    for failed, known, together in pools[2].run(samples_that_fail, failing):
        assert failed == ([(1, "samples")] if failing < 2 else [])
        assert known == ({} if failing < 2 else {"sampled_step": 1})
        assert together == 2
