"""G07, G08: a terminal that closes, a reader that goes or stops reading: the run saves and ends, or goes on."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.cli import LIMIT_SECONDS, gone

QUICK = ("train.sample_prompts=[]", "train.evaluate_every=0", "output.checkpoint_every=0", "data.validation=none")
ENDLESS = ("train", "small.yaml", "--output", "run", "train.steps=100000", "optim.schedule=constant", *QUICK)


def saved_at_the_last_step(cli) -> None:
    step = cli.events("run", "step")[-1]["step"]
    assert (cli.folder / "run" / "checkpoints" / f"step-{step:06d}" / "manifest.json").exists()
    assert not (cli.folder / "run" / "run.lock").exists()
    assert (cli.folder / "run" / "report.html").exists()


@pytest.mark.parametrize("how", ["hangup twice", pytest.param("hangup and term", marks=pytest.mark.slow)])
def test_hangups_save_and_end(cli, how):
    process = cli.start(*ENDLESS, "--ranks", "2")
    cli.wait_for_step("run", 2, process)
    ranks = cli.rank_processes("run")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.4)  # longer than two that count as one: shell and kernel each send theirs
    if process.poll() is None:
        process.send_signal(signal.SIGHUP if how == "hangup twice" else signal.SIGTERM)
    done = cli.finish(process, 130)
    assert gone(ranks)
    assert f"tercet train --resume {cli.folder}/run" in done.stderr
    saved_at_the_last_step(cli)


LAST_WORDS = """
import os, signal
from tercet.training.stop import SIGNALS, Stop
with Stop().installed() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
assert stop.requested
for number in SIGNALS:
    os.kill(os.getpid(), number)
print("the run continues with ...", flush=True)
"""


def test_a_signal_while_the_last_words_are_said():
    done = subprocess.run([sys.executable, "-c", LAST_WORDS], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert (done.returncode, done.stdout) == (0, "the run continues with ...\n"), done.stderr


def test_a_terminal_that_is_closed(cli):
    """A real terminal with the run in its foreground: closing it hangs up, and nothing can be printed any more."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "tercet", *ENDLESS, "--ranks", "2"]
    attach = f"import os, fcntl, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv({command[0]!r}, {command!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", attach], cwd=cli.folder, env=cli.environment, stdin=side, stdout=side, stderr=side
    )
    os.close(side)
    seen = threading.Event()

    def read() -> None:  # what is printed must go somewhere until the terminal closes
        while not seen.is_set():  # never waiting in a read: that would hold the terminal open
            if select.select([main], [], [], 0.05)[0]:
                os.read(main, 4096)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    cli.wait_until(lambda: any(e["step"] >= 2 for e in cli.events("run", "step")), process)  # type: ignore[arg-type]
    ranks = cli.rank_processes("run")
    seen.set()
    reader.join()
    os.close(main)
    assert process.wait(LIMIT_SECONDS) == 130
    assert gone(ranks)
    saved_at_the_last_step(cli)
    assert "stopping: finishing step" in (cli.folder / "run" / "logs" / "session.log").read_text()


@pytest.mark.parametrize("stream", ["both", "closed from the start"])
@pytest.mark.slow
def test_a_reader_that_goes_does_not_end_the_run(cli, stream):
    arguments = ("train", "small.yaml", "--ranks", "2", "--output", "run", *QUICK)
    command = f"{sys.executable} -m tercet {' '.join(arguments)}"
    pipe = "2>&1 | head -1" if stream == "both" else ">&- 2>&-"
    done = subprocess.run(
        ["bash", "-c", f"{command.replace('[]', chr(39) + '[]' + chr(39))} {pipe}; exit ${{PIPESTATUS[0]}}"],
        cwd=cli.folder, env=cli.environment, timeout=LIMIT_SECONDS, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(cli.losses("run")) == 30
    assert "step 30/30" in (cli.folder / "run" / "logs" / "rank-0.log").read_text()
    assert "run folder" in (cli.folder / "run" / "logs" / "session.log").read_text()


@pytest.mark.slow
def test_a_reader_that_stops_reading_does_not_hold_up_the_run(cli):
    """A paused terminal: its buffer is full from the start, and nobody reads until the run has ended."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet", "train", "small.yaml", "--ranks", "2", "--output", "run", *QUICK],
        cwd=cli.folder, env=cli.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=write,
    )  # fmt: skip
    os.close(write)
    assert process.wait(LIMIT_SECONDS) == 0
    os.close(read)
    assert len(cli.losses("run")) == 30


@pytest.mark.slow
def test_nohup_is_left_alone(cli):
    process = subprocess.Popen(
        [sys.executable, "-m", "tercet", "train", "small.yaml", "--ranks", "1", "--output", "run", *QUICK],
        cwd=cli.folder, env=cli.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )  # fmt: skip
    cli.wait_for_step("run", 1, process)
    process.send_signal(signal.SIGHUP)
    cli.finish(process, 0)
    assert len(cli.losses("run")) == 30
