"""G41: on file systems without locks, and for users without a home, runs work or say what to set."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest

from tercet.locks import FileLock, kernel_locks_in, process_record

PATCH = """
import errno, fcntl
def flock(file, operation):
    raise OSError({number}, "no locks here")
fcntl.flock = flock
"""


def without_locks(cli, number: int = errno.ENOLCK) -> None:
    place = cli.folder / "patch"
    place.mkdir()
    (place / "sitecustomize.py").write_text(PATCH.format(number=number))
    cli.environment["PYTHONPATH"] = str(place)


@pytest.mark.slow
def test_a_run_of_two_ranks_trains_and_resumes(cli):
    without_locks(cli)
    cli.run("train", "small.yaml", "--ranks", "2", "--output", "run", "train.steps=3", "data.cache=cache")
    cli.run("train", "--resume", "run", "train.steps=4")
    assert len(cli.losses("run")) == 4
    assert not list((cli.folder / "run").glob(".*owner*"))


@pytest.mark.slow
def test_a_second_process_is_still_refused(cli):
    without_locks(cli, errno.ENOSYS)
    first = cli.start("train", "small.yaml", "--ranks", "1", "--output", "run", "train.steps=100000")
    cli.wait_for_step("run", 1, first)
    second = cli.run("train", "--resume", "run", code=1)
    assert f"in use by process {first.pid}" in second.stderr
    first.terminate()
    cli.finish(first, 130)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_one_holder_at_a_time_and_the_dead_hold_nothing(tmp_path, monkeypatch, number):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    assert not kernel_locks_in(tmp_path)
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.acquire()
    assert not other.acquire() and str(os.getpid()) in other.holder()
    lock.release()
    assert other.acquire()
    other.release()
    ended = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    record = process_record(ended.pid)
    ended.communicate(b"\n")
    lock.owner.write_text(json.dumps(record))
    assert lock.acquire()  # its process is gone
    lock.release()
    lock.owner.write_text(json.dumps({**record, "host": "another-host"}))
    assert not lock.acquire() and "another-host" in lock.holder()  # nobody here knows whether it runs


def test_other_errors_of_the_file_system_are_not_taken_for_missing_locks(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(OSError, match="broken disk"):
        FileLock(tmp_path / "lock").acquire()


NAMELESS = """
import pwd
def getpwuid(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")
pwd.getpwuid = getpwuid
"""


@pytest.mark.slow
def test_a_user_without_home_or_name(cli, finished):
    place = cli.folder / "patch"
    place.mkdir()
    (place / "sitecustomize.py").write_text(NAMELESS)
    cli.environment["PYTHONPATH"] = str(place)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        cli.environment.pop(name, None)
    shutil.copytree(finished[0].folder / finished[1], cli.folder / "old")
    cli.run("plan", "small.yaml", "--gpus", "3x4090")
    prepared = cli.run("prepare", "small.yaml", code=2)
    assert "XDG_CACHE_HOME" in prepared.stderr and "data.cache" in prepared.stderr
    cli.run("report", "old")
    cli.run("train", "small.yaml", "--ranks", "2", "train.steps=2", "data.cache=cache", "--output", "new")
    cli.run("generate", "new", "The", "--tokens", "2")
    assert not (cli.folder / "~").exists()


PRELOADED = """
#include <errno.h>
int flock(int file, int operation) { errno = ENOLCK; return -1; }
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")
def test_no_library_locks_either(cli):
    source = cli.folder / "flock.c"
    source.write_text(PRELOADED)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", cli.folder / "flock.so", source], check=True)
    cli.environment["LD_PRELOAD"] = str(cli.folder / "flock.so")
    cli.run("train", "small.yaml", "--ranks", "3", "--output", "run", "train.steps=3", "data.cache=cache")
    assert len(cli.losses("run")) == 3
