"""D08: space is checked first; on a full disk the partial save goes, earlier ones stay; wait or stop by policy."""

from __future__ import annotations

import collections
import errno
import re
import shutil
from pathlib import Path

import pytest

from tercet.engine import shards
from tercet.errors import TercetError
from tercet.parallel.world import World
from tercet.spec.run_folder import RunFolder
from tercet.training import disk
from tercet.training.checkpoint import fault_of, steps_in
from tercet.training.record import Recorder
from tests.cases.checkpoints import SmallEngine, checkpoints, state
from tests.tiny import micro_batches, tiny_engine, tiny_strategy

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def keeper_with_one(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "POLL_SECONDS", 0.001)
    checkpoints(tmp_path).save(SmallEngine(), state(1))
    return tmp_path


def intact(folder) -> None:
    assert [step for step, _ in steps_in(folder / "checkpoints")] == [1]
    assert fault_of(folder / "checkpoints" / "step-000001") is None
    assert not list((folder / "checkpoints").glob(".*")), "a partial save was left"


def train_and_save(world: World, folder: Path, policy: str, times: int):
    """A real engine saves twice; rank 1's disk is full in the middle of the second one, as often as `times` says."""
    disk.POLL_SECONDS = 0.001
    said: list[str] = []
    engine = tiny_engine(world, tiny_strategy("zero2", world.size, 4))
    keeper = checkpoints(folder, world, disk_full=policy, say=said.append)
    write, left = shards.save_tensors, times

    def full(path, tensors, metadata):
        nonlocal left
        write(path, tensors, metadata)
        if world.rank == 1 and left and ".step-000002" in str(path):
            left -= 1
            path.write_bytes(path.read_bytes()[:1000])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    shards.save_tensors = full
    message = hint = None
    code = 0
    try:
        for step in (1, 2):
            engine.step(micro_batches(step, world.rank, world.size, 1, 4), 1e-2)
            keeper.save(engine, state(step))
    except TercetError as error:
        message, hint, code = error.message, error.hint, error.exit_code
    finally:
        shards.save_tensors = write
    other = tiny_engine(world, tiny_strategy("zero2", world.size, 4))
    other.load(folder / "checkpoints" / f"step-00000{keeper.last_step}")
    engine.step(micro_batches(3, world.rank, world.size, 1, 4), 1e-2)  # no rank is lost to the others
    return message, hint, code, said, keeper.last_step, other.steps_done


def test_stop_policy_says_what_it_needs_and_what_is_free(pools, tmp_path):
    for message, hint, code, _, last, steps in pools[2].run(train_and_save, tmp_path, "stop", 1):
        assert re.search(r"disk full: the checkpoint of step 2 needs 1000 B, [\d.]+ \w+ are free in", message)
        assert (code, last, steps) == (1, 1, 1)
        assert "--resume" in hint
    intact(tmp_path)


def test_wait_policy_tries_again_until_there_is_space(pools, tmp_path):
    for message, _, _, said, last, steps in pools[2].run(train_and_save, tmp_path, "wait", 2):
        assert (message, last, steps) == (None, 2, 2)
        assert len(said) == 2 and all("rank 1" in line for line in said)
    assert [step for step, _ in steps_in(tmp_path / "checkpoints")] == [2, 1]
    assert fault_of(tmp_path / "checkpoints" / "step-000002") is None


def test_space_is_checked_before_anything_is_written(keeper_with_one, monkeypatch):
    free = iter([10, 10, 10, 10])
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, next(free, None) or real(path).free))
    said: list[str] = []
    checkpoints(keeper_with_one, disk_full="wait", say=said.append).save(SmallEngine(), state(2))
    assert any("needs 1000 B, 10 B are free" in line for line in said)
    assert [step for step, _ in steps_in(keeper_with_one / "checkpoints")] == [2, 1]


def test_a_request_to_stop_ends_the_waiting(keeper_with_one, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 10))
    with pytest.raises(TercetError, match="disk full"):
        checkpoints(keeper_with_one, disk_full="wait", stop=lambda: True).save(SmallEngine(), state(2))
    intact(keeper_with_one)


def test_events_wait_in_memory_for_space(tmp_path):
    run = RunFolder(tmp_path)
    recorder = Recorder(run, 10, None)
    real, broken = recorder._file, [True]

    class Full:
        def write(self, data):
            if broken[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(data)

        def fileno(self):
            return real.fileno()

        def close(self):
            real.close()

    recorder._file = Full()
    recorder.event("checkpoint", step=1)
    recorder.event("checkpoint", step=2)
    assert run.read_events() == []
    broken[0] = False
    recorder.event("checkpoint", step=3)
    recorder.close()
    assert [row["step"] for row in run.read_events()] == [1, 2, 3]
