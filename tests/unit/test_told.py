"""What ranks tell through the supervisor's pipe when the disk takes no report."""

from __future__ import annotations

import os

from tests.run_folders import FakeRun

from tercet.training.failure import first_error
from tercet.training.told import Pipe, tell


def report(rank: int, message: str, **more):
    known = {"rank": rank, "time": 1.0, "step": 3, "rows": list(range(1000)), "message": message, "hint": None}
    return {**known, "exit_code": 1, "echo": False, "interrupted": False, "shared": False, **more}


def test_every_rank_is_heard_whole(tmp_path):
    pipe = Pipe()
    for rank in range(20):  # more than a pipe holds, were they not shortened
        tell(pipe.write_end, report(rank, "磁盘已满 " * 9999, time=9.0 - rank))
    told = pipe.close()
    assert {r["rank"] for r in told} <= set(range(20)) and len(told) >= 12
    assert all(r["message"].startswith("磁盘已满") for r in told)


def test_a_supervisor_that_is_gone_or_a_pipe_that_is_full_ends_nothing():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    for _ in range(99):
        tell(write_end, report(0, "x" * 600))
    os.close(read_end)
    tell(write_end, report(0, "x"))
    os.close(write_end)


def test_what_was_told_counts_as_what_was_written(tmp_path):
    run = FakeRun(tmp_path / "run").run
    run.logs.mkdir()
    pipe = Pipe()
    tell(pipe.write_end, report(1, "disk full: the checkpoint of step 4 needs 2 GB"))
    assert "disk full: " in str(first_error(run, [1, 1], None, told=pipe.close()))
