"""D08: space is checked first; on a full disk the partial save goes, earlier ones stay; wait or stop by policy."""

from __future__ import annotations

import collections
import errno
import shutil

import pytest

from tercet.errors import TercetError
from tercet.spec.run_folder import RunFolder
from tercet.training import disk
from tercet.training.checkpoint import fault_of, steps_in
from tercet.training.record import Recorder
from tercet.weights import writing
from tests.cases.checkpoints import SmallEngine, checkpoints, state

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


def fail_in_the_middle(monkeypatch, times: int) -> None:
    """The writer runs out of space after some bytes, as often as `times` says."""
    save, left = writing.save_file, [times]

    def write(tensors, path, metadata):
        save(tensors, path, metadata)
        if left[0]:
            left[0] -= 1
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(writing, "save_file", write)


def test_stop_policy_says_what_it_needs(keeper_with_one, monkeypatch):
    fail_in_the_middle(monkeypatch, 1)
    with pytest.raises(TercetError, match=r"disk full.*needs 1000 B.*free in") as caught:
        checkpoints(keeper_with_one, disk_full="stop").save(SmallEngine(), state(2))
    assert caught.value.exit_code == 1
    assert "--resume" in caught.value.hint
    intact(keeper_with_one)


def test_wait_policy_tries_again_until_there_is_space(keeper_with_one, monkeypatch):
    fail_in_the_middle(monkeypatch, 2)
    said: list[str] = []
    checkpoints(keeper_with_one, disk_full="wait", say=said.append).save(SmallEngine(), state(2))
    assert [step for step, _ in steps_in(keeper_with_one / "checkpoints")] == [2, 1]
    assert fault_of(keeper_with_one / "checkpoints" / "step-000002") is None
    assert len(said) == 2


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
