"""G62: a busy MASTER_PORT is named; warnings of any rank and any logger reach the console, first of each kind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.cli import LIMIT_SECONDS


def test_a_busy_port_is_named_with_its_owner(cli):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        environment = {
            **cli.environment, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "tercet", "train", "small.yaml", "--output", "run"],
            cwd=cli.folder, env=environment, text=True, capture_output=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"MASTER_PORT {port} is in use on this machine, by process {os.getpid()}" in done.stderr
    assert "fault of Tercet" not in done.stderr and "Traceback" not in done.stderr
    assert not (cli.folder / "run").exists()


@pytest.mark.slow
def test_the_first_of_each_kind_with_its_rank(cli):
    cli.inject("""
        import logging, sys, warnings
        import tercet.engine.native as m
        plain = m.NativeEngine.step
        cut_off = logging.getLogger("somebody.else")
        cut_off.propagate = False
        cut_off.addHandler(logging.StreamHandler(sys.stdout))
        def step(self, *args):
            if RANK == 2:
                logging.getLogger("tercet").warning("ours is odd")
                logging.getLogger("library").error("theirs: retry %d", self.steps_done)
                logging.getLogger("library").info("chatter")
                cut_off.warning("with a handler of its own")
                warnings.warn("a plain warning", UserWarning)
            logging.getLogger("library").warning("all ranks say this")
            return plain(self, *args)
        m.NativeEngine.step = step
    """)
    done = cli.run(
        "train", "small.yaml", "--ranks", "3", "--output", "run", "train.steps=3", "train.sample_prompts=[]",
        "train.evaluate_every=0", "output.checkpoint_every=0",
    )  # fmt: skip
    for text in ("ours is odd", "theirs: retry 0", "with a handler of its own", "a plain warning"):
        (line,) = [line for line in done.stderr.splitlines() if text in line]
        assert line.startswith("rank 2: ")
    assert done.stderr.count("theirs: retry") == 1
    assert done.stderr.count("all ranks say this") == 1, "once, not once a rank"
    assert "chatter" not in done.stderr
    log = (cli.folder / "run" / "logs" / "rank-2.log").read_text()
    assert log.count("theirs: retry") == 3
    assert "a plain warning" in log


@pytest.mark.parametrize("ranks", ["1"])
@pytest.mark.slow
def test_a_quiet_run_shows_no_warning(cli, ranks):
    done = cli.run("train", "small.yaml", "--ranks", ranks, "--output", "run", "train.steps=2")
    assert "rank 0: " not in done.stderr
