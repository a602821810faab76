"""Start the ranks, watch them, tell the first real error, leave no process behind. Loads no torch.

Why not torch's elastic agent: docs/decisions/0003. `tercet train` also runs under torchrun (training/launched.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tercet import children
from tercet.errors import CardFullError, InterruptedRun, TercetError
from tercet.probe.selftest import environment_for
from tercet.training.cards import CardWatch
from tercet.training.failure import first_error
from tercet.training.pace import stopping_line
from tercet.training.session import Asked, Session, resume_command
from tercet.training.stop import Stop
from tercet.training.swap import Swap
from tercet.training.told import Pipe

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0  # for the other ranks to tell what they know, after one has failed


def train(
    recipe_name: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    output: str | None = None,
    restarts: int = 0,
    say: Callable[[str], None] = lambda text: None,
    watch: tuple[int, int] | None = None,
) -> Path:
    """Train a recipe and return the run folder. Raises TercetError (its exit_code says which kind).

    `watch`: (first, count) of steps during which rank 0 looks at its collectives, for tercet bench.
    """
    asked = Asked(recipe_name, overrides, output=output, ranks=ranks, restarts=restarts)
    return run_session(asked, say, watch)


def resume(
    folder: str | Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    restarts: int = 0,
    accept_changed_data: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Path:
    """Continue a run from its newest complete checkpoint; a finished run says so and is left alone.

    Data that has changed since the run began is refused unless accepted.
    """
    asked = Asked(
        overrides=overrides, resume=folder, ranks=ranks, restarts=restarts, accept_changed_data=accept_changed_data
    )
    return run_session(asked, say)


def run_session(asked: Asked, say: Callable[[str], None], watch: tuple[int, int] | None = None) -> Path:
    """Do what was asked for and return the run folder. A signal at any time ends it and leaves nothing behind."""
    with Stop().installed() as stop:
        with stop.at_once():
            session = Session(asked, say)
        if not session.finished:
            with session:
                _run_to_the_end(session, stop, watch)
        return session.run.path


def _run_to_the_end(session: Session, stop: Stop, watch: tuple[int, int] | None) -> None:
    swap, restarts, attempt = Swap(session.run), session.restarts, 0
    while True:
        try:
            with stop.at_once():
                swap.prepare(session.say)
                repairs = _repairs(session)
            _Ranks(session, stop, repairs, watch).run()
            return
        except TercetError as error:
            if isinstance(error, CardFullError) and not stop.requested and session.take_smaller_micro_batch(error):
                continue
            if error.exit_code != 1 or attempt == restarts or stop.requested:
                raise
            attempt += 1
            session.say(f"{error}\nrestart {attempt} of {restarts}")
        finally:
            swap.remove()


def _repairs(session: Session) -> dict[str, str]:
    """Return what collectives need on cards whose peer access lies or hangs."""
    return environment_for(session.ranks, session.say)


class _Ranks:
    """The processes of one start. The first signal is passed on to them, the second ends them."""

    def __init__(self, session: Session, stop: Stop, repairs: dict[str, str], watch: tuple[int, int] | None):
        self._session, self._stop, self._repairs, self._watched = session, stop, repairs, watch
        self._ended_here: set[int] = set()  # ranks that did not end by themselves after another had failed
        self._asked = False
        self._started = time.time()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._cards: CardWatch | None = None
        self._pipe = Pipe()

    def run(self) -> None:
        """Return when all ranks have ended well. Raises the first real error otherwise; no rank is left."""
        # Not TemporaryDirectory: its finalizer would run in a signal's exception.
        meeting = tempfile.mkdtemp(prefix="tercet-")
        for old in self._session.run.logs.glob("error-rank-*.json"):  # of an earlier start of this session
            old.unlink()
        try:
            for rank in range(self._session.ranks):
                if self._stop.requested:
                    raise InterruptedRun("stopped while the ranks were starting")
                self._ranks.append(self._start(rank, f"{meeting}/store"))
            self._session.hold([p.pid for p in self._ranks])
            with CardWatch(self._session.run, self._session.ranks, self._session.say) as self._cards:
                self._watch()
        finally:
            self._end_all()
            told = self._pipe.close()
            shutil.rmtree(meeting, ignore_errors=True)
        codes = [p.returncode for p in self._ranks]
        if any(codes) and self._cards is not None and self._cards.lost:
            raise TercetError(
                f"{self._cards.lost}; the run has ended",
                f"Check its power cable and slot, and restart the machine. {resume_command(self._session.run)}",
            )
        if any(codes):
            raise first_error(self._session.run, codes, self._why_stopped(), self._ended_here, told)

    def _why_stopped(self) -> str | None:
        if self._stop.discarded:
            return "stopped at once; what was done since the last checkpoint is discarded"
        return "stopped before the first step; there was nothing to save" if self._asked else None

    def _start(self, rank: int, store: str) -> subprocess.Popen[bytes]:
        ranks = self._session.ranks
        environment = children.environment(self._repairs)
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        # Without this every rank starts a thread per core and they take turns pushing each other off.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks)))
        command = children.command(
            "tercet.training.rank", *map(str, (self._session.run.path, store, os.getpid(), self._pipe.write_end))
        )
        if self._watched is not None and rank == 0:
            command += ["--watch", "{}:{}".format(*self._watched)]
        if self._session.accept_changed_data:
            command.append("--accept-changed-data")
        # A session of their own: Ctrl-C in the terminal reaches the supervisor alone, which passes it on once.
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(self._pipe.write_end,),
        )

    def _watch(self) -> None:
        failed_at = None
        while any(p.poll() is None for p in self._ranks):
            time.sleep(POLL_SECONDS)
            if self._stop.discarded:
                return
            self._pass_on()
            ended_badly = any(p.poll() for p in self._ranks) or (self._cards is not None and self._cards.lost)
            if not ended_badly:
                continue
            if failed_at is None:
                failed_at = time.monotonic()
                self._send(signal.SIGUSR1)  # those that still run write where they are: one may never have arrived
            elif time.monotonic() - failed_at > GRACE_SECONDS:
                return

    def _pass_on(self) -> None:
        """Hand the first request to stop to the ranks, once, and say what comes now."""
        if self._stop.requested and not self._asked:
            self._asked = True
            self._send(signal.SIGTERM)
            self._session.say(stopping_line(self._session.run, self._started))

    def _send(self, number: int) -> None:
        for process in self._ranks:
            if process.poll() is None:
                process.send_signal(number)

    def _end_all(self) -> None:
        for rank, process in enumerate(self._ranks):
            if process.poll() is None:
                self._ended_here.add(rank)
                process.kill()
        for process in self._ranks:
            process.wait()
