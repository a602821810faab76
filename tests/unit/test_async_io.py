"""E11 for the library of files on NVMe: built once, before the ranks; what is missing or fails is told with a way out."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from tests.deepspeed_tiny import needs_deepspeed

from tercet.engine.deepspeed import async_io
from tercet.engine.deepspeed.async_io import ensure_built, is_built, require_direct_files, why_not_here
from tercet.errors import InputError


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def silent(*_):
    return None


@needs_deepspeed
def test_two_jobs_at_once_build_once(home, monkeypatch):
    builds = []

    def build(folder, progress):
        builds.append(folder)
        both_wait.wait(10)  # until the other one has come and waits for the lock
        for name in async_io.LIBRARIES:
            async_io.library(name).write_bytes(b"")

    both_wait = threading.Event()
    monkeypatch.setattr(async_io, "_build", build)
    monkeypatch.setattr(async_io, "why_not_here", lambda: [])
    jobs = [threading.Thread(target=ensure_built, args=(silent, silent)) for _ in range(2)]
    for job in jobs:
        job.start()
    both_wait.set()
    for job in jobs:
        job.join(20)
    assert len(builds) == 1 and is_built()
    ensure_built(silent, silent)
    assert len(builds) == 1, "what is there is not built again"


@needs_deepspeed
def test_without_tools_each_is_named_with_the_way_to_get_it(home, monkeypatch):
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(async_io.sys, "executable", str(home / "python"))
    assert {"no C++ compiler (apt install g++)", "no ninja (pip install ninja)"} <= set(why_not_here())
    with pytest.raises(InputError, match="no C\\+\\+ compiler") as caught:
        ensure_built(silent, silent)
    assert "strategy.offload.optimizer=cpu" in str(caught.value)
    assert not is_built()


@needs_deepspeed
@pytest.mark.slow
def test_a_failed_build_shows_the_compilers_words_and_leaves_nothing(home, monkeypatch):
    """Needs ninja and libaio; the compiler is a stub that fails."""
    if missing := why_not_here():
        pytest.skip("; ".join(missing))
    compiler = home / "g++"
    compiler.write_text("#!/bin/sh\necho 'error: this compiler is a stub' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(InputError, match="failed") as caught:
        ensure_built(silent, silent)
    assert "strategy.offload.optimizer=cpu" in str(caught.value)
    assert not is_built() and not list(async_io.built_in().glob("build-*"))


def test_a_file_system_without_direct_access_is_refused(home, monkeypatch):
    real = os.open

    def without(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(async_io.os, "open", without)
    with pytest.raises(InputError, match="O_DIRECT") as caught:
        require_direct_files(home / "swap")
    assert "local drive" in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(home):
    (home / "file").write_text("")
    with pytest.raises(InputError, match="nvme_path"):
        require_direct_files(Path(home, "file", "swap"))
