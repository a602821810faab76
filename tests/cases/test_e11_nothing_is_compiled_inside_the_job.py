"""E11: an offloaded run needs no compiler; what must be compiled (NVMe) is built once, under a lock, before the ranks."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from tercet.engine import deepspeed_build
from tercet.errors import InputError, NotLegalError
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches

# A stand-in for the compiler: takes a moment, leaves a library, and counts its calls.
STUB = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "calls").open("a") as file:
    file.write("x")
time.sleep(0.3)
(folder / "library.so").write_bytes(b"x")
print("built", folder / "library.so")
"""


def build(folder: str, out) -> None:
    os.environ["XDG_CACHE_HOME"] = folder
    deepspeed_build.missing_tools = lambda: []
    said: list[str] = []
    deepspeed_build.ensure_built(said.append, [sys.executable, "-c", STUB, folder])
    out.put(said)


@needs_deepspeed
def test_three_processes_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    processes = [context.Process(target=build, args=(str(tmp_path), out)) for _ in range(3)]
    for process in processes:
        process.start()
    said = [out.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=10)
        assert process.exitcode == 0
    assert (tmp_path / "calls").read_text() == "x"
    assert sorted(map(len, said)) == [0, 0, 2]  # one of them announces the build and its end


@needs_deepspeed
def test_a_build_that_fails_is_told_with_its_log(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(deepspeed_build, "missing_tools", lambda: [])
    with pytest.raises(NotLegalError, match=r"did not compile; its log is .*\.log") as caught:
        deepspeed_build.ensure_built(lambda text: None, [sys.executable, "-c", "raise SystemExit('no such header')"])
    log = Path(str(caught.value).split("its log is ")[1].split(";")[0])
    assert "no such header" in log.read_text()
    assert not deepspeed_build.is_built()


@needs_deepspeed
def test_without_tools_every_cause_is_named_and_the_other_way(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(deepspeed_build, "search_path", lambda: str(tmp_path))
    monkeypatch.setattr(deepspeed_build, "HEADERS", (str(tmp_path),))
    with pytest.raises(NotLegalError) as caught:
        deepspeed_build.ensure_built(lambda text: None)
    text = str(caught.value)
    assert "no C++ compiler" in text and "pip install ninja" in text and "libaio-dev" in text


def train_without_tools(world, folder: str):
    before = dict(os.environ)
    os.environ.update(PATH=folder, XDG_CACHE_HOME=folder)
    for name in ("CUDA_HOME", "CXX"):
        os.environ.pop(name, None)
    try:
        engine = engine_of(world, layout("zero2-cpu", world.size, 4), 4, "bf16")
        losses = [engine.step(micro_batches(s, world.rank, world.size, 1, 4), 1e-2).loss for s in range(3)]
        return losses, type(engine.fragments.base).__name__, engine.config["optimizer"]["params"]
    finally:
        os.environ.clear()
        os.environ.update(before)


@needs_deepspeed
def test_an_offloaded_run_needs_no_compiler(pools, tmp_path):
    for losses, optimizer, parameters in pools[2].run(train_without_tools, str(tmp_path)):
        assert losses[-1] < losses[0]
        assert optimizer == "AdamW" and parameters["torch_adam"] and parameters["fused"]
    assert not list(tmp_path.rglob("*.so")), "something was compiled"


def test_without_deepspeed_the_way_to_install_it_is_told(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "deepspeed" else real(name, *a))
    with pytest.raises(InputError, match="not installed") as caught:
        deepspeed_build.prepare(("cpu", "none"), lambda text: None)
    assert 'pip install "tercet[deepspeed]"' in str(caught.value)
