"""D07: killed at random points of a save, or a file cut by one byte: resuming finds the newest complete one."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tercet.errors import InputError
from tercet.training.checkpoint import fault_of, find_checkpoint, steps_in
from tests.cases.checkpoints import SmallEngine, checkpoints, state


def test_killed_twenty_times(tmp_path):
    chance = random.Random(4)
    first = 1
    for _ in range(20):
        child = os.fork()
        if child == 0:
            keeper = checkpoints(tmp_path)
            for step in range(first, first + 10_000):
                keeper.save(SmallEngine(), state(step))
            os._exit(0)
        deadline = time.monotonic() + 30
        while not any(step >= first for step, _ in steps_in(tmp_path / "checkpoints")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = find_checkpoint(tmp_path / "checkpoints")
        assert found is not None
        assert found.skipped == []
        assert fault_of(found.folder) is None
        assert found.state["step"] >= first
        first = found.state["step"] + 1


@pytest.mark.parametrize("damage", ["cut", "flip", "missing", "manifest"])
def test_a_damaged_one_is_passed_over_and_named(tmp_path, damage):
    keeper = checkpoints(tmp_path)
    keeper.save(SmallEngine(), state(1))
    keeper.save(SmallEngine(), state(2))
    newest = tmp_path / "checkpoints" / "step-000002"
    victim = newest / ("manifest.json" if damage == "manifest" else "rank-0.safetensors")
    content = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(content[:-1])
    elif damage == "flip":
        content[-1] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    found = find_checkpoint(tmp_path / "checkpoints")
    assert found.state["step"] == 1
    assert len(found.skipped) == 1
    assert str(victim) in found.skipped[0]


def test_none_complete_is_an_error_that_names_the_file(tmp_path):
    checkpoints(tmp_path).save(SmallEngine(), state(1))
    victim = tmp_path / "checkpoints" / "step-000001" / "rank-0.safetensors"
    victim.unlink()
    with pytest.raises(InputError, match=str(victim)):
        find_checkpoint(tmp_path / "checkpoints")


def test_none_ever_published_is_no_error(tmp_path):
    assert find_checkpoint(tmp_path / "checkpoints") is None
