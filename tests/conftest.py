"""Shared fixtures: pools of ranks, started once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

# One thread a process: models here are tiny, and OpenMP's threads wait by spinning. Where other work shares the cores
# a run of five seconds would take a minute. Before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # runs and ranks start by the hundred: they compile our files once

import pytest

from tests.cli import Cli
from tests.ranks import Ranks

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and every run started here would ignore it


def pytest_addoption(parser) -> None:
    parser.addoption("--kills", type=int, default=200, help="how often the runs of test_g09 are killed, in all")
    parser.addoption("--kill-seed", type=int, default=1, help="at which moments and how")


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """1 to 4 gloo ranks; each pool starts at its first use."""
    found = {n: Ranks(n) for n in (1, 2, 3, 4)}
    yield found
    for pool in found.values():
        pool.stop()


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cli(tmp_path: Path, text_cache: Path) -> Cli:
    return Cli(tmp_path, text_cache)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, text_cache: Path) -> tuple[Cli, str]:
    """A run that was never interrupted, 30 steps on 3 ranks: what others are compared with."""
    cli = Cli(tmp_path_factory.mktemp("finished"), text_cache)
    process = cli.run("train", "small.yaml", "--ranks", "3", "--output", "run")
    (cli.folder / "output.txt").write_text(process.stdout)
    (cli.folder / "errors.txt").write_text(process.stderr)
    return cli, "run"
