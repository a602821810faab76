"""One rank as a process: its log file, its life bound to its parent's, its error as a file for the supervisor."""

from __future__ import annotations

import argparse
import faulthandler
import io
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.errors import InterruptedRun, RunError, TercetError, disk_full, file_error
from tercet.parallel.bond import die_with_parent
from tercet.spec.memory_limit import memory_limit
from tercet.spec.recipe import Recipe, load_run_recipe
from tercet.spec.run_folder import RunFolder
from tercet.training.console import ConsoleFile
from tercet.training.launcher import how_started
from tercet.training.pace import BEFORE_A_STEP, RECENT_STEPS, sentence
from tercet.training.preflight import require_planned_device
from tercet.training.stop import Stop
from tercet.training.told import tell
from tercet.training.warned import WARNED, show_warnings
from tercet.units import show_bytes

if TYPE_CHECKING:
    from tercet.parallel.world import World

NO_HOST_MEMORY = ("can't allocate memory", "std::bad_alloc", "Cannot allocate memory")  # torch's and the system's words
STACK_SIGNAL = signal.SIGUSR1  # the supervisor asks a rank that does not answer for its stack


def _duplicate(descriptor: int) -> int:
    try:
        return os.dup(descriptor)
    except OSError:  # started with it closed
        return os.open(os.devnull, os.O_WRONLY)


class _Log(io.FileIO):
    """A rank's log lies on the disk that may be full: what cannot be written is lost, and no print ends the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _log_stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.BufferedWriter(_Log(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="replace", line_buffering=True)


def error_file(run: RunFolder, rank: int) -> Path:
    return run.logs / f"error-rank-{rank}.json"


class Rank:
    """Where this rank is, for its error report; and its console and log."""

    def __init__(self, run: RunFolder, rank: int):
        self.run, self.rank = run, rank
        self.step, self.rows = 0, []
        self._began, self._seconds = time.time(), []  # of this step, and how long earlier ones took
        run.logs.mkdir(parents=True, exist_ok=True)
        # What anything prints (C++ included) goes to the rank's log; the console is kept for rank 0's lines.
        self._kept = tuple(_duplicate(n) for n in (1, 2))
        encoding = sys.stderr.encoding if sys.stderr else None
        log = os.open(run.log_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        sys.stdout, sys.stderr = _log_stream(1), _log_stream(2)
        self.console = ConsoleFile(self._kept[1], encoding, sys.stderr)
        faulthandler.enable(sys.stderr)
        faulthandler.register(STACK_SIGNAL, sys.stderr)
        show_warnings(self.console, rank, run.logs / WARNED)
        print(f"rank {rank}: process {os.getpid()} started {time.strftime('%F %T')}", flush=True)

    def give_back(self) -> None:
        """Put stdout and stderr back where they led before."""
        self.console.drain()
        for descriptor, kept in enumerate(self._kept, 1):
            os.dup2(kept, descriptor)

    def at(self, step: int, rows: list[int]) -> None:
        now = time.time()
        if step == self.step + 1 and self.step:
            self._seconds = [*self._seconds[1 - RECENT_STEPS :], now - self._began]
        self.step, self.rows, self._began = step, rows, now

    def say_stopping(self) -> None:
        """Say what comes between a request to stop and the end; safe in a signal's handler."""
        known = sentence(self.step - 1, self._seconds, time.time() - self._began) if self._seconds else BEFORE_A_STEP
        self.console.say(known)

    def report(self, error: BaseException, unwritten: Callable[[dict[str, Any]], None]) -> int:
        """Leave the error as a file and return its exit code; the log gets the traceback.

        `unwritten` gets what the disk does not take.
        """
        traceback.print_exception(error)
        content = {
            "rank": self.rank,
            "time": time.time(),
            "step": self.step,
            "rows": self.rows,
            **describe_error(error),
        }
        from tercet.training.record import write_json

        try:
            write_json(error_file(self.run, self.rank), content)
        except OSError:
            unwritten(content)
        return int(content["exit_code"])


def describe_error(error: BaseException) -> dict[str, Any]:
    """Return message, hint and exit code of any error; `echo` marks one that another rank's end caused."""
    import torch

    from tercet.parallel.world import is_collective_failure

    if isinstance(error, TercetError):
        return {
            "message": error.message,
            "hint": error.hint,
            "exit_code": error.exit_code,
            "echo": False,
            "interrupted": isinstance(error, InterruptedRun),
            "shared": isinstance(error, RunError),
        }
    if (told := (file_error(error) if isinstance(error, OSError) else None) or disk_full(error)) is not None:
        return describe_error(told)
    content = {
        "message": f"{type(error).__name__}: {error}",
        "hint": None,
        "exit_code": 1,
        "interrupted": False,
        "echo": is_collective_failure(error),
    }
    no_host_memory = isinstance(error, MemoryError) or any(sign in str(error) for sign in NO_HOST_MEMORY)
    if no_host_memory or isinstance(error, torch.OutOfMemoryError):
        content["message"] = f"out of memory: {error}"
        content["card_full"] = not no_host_memory
        content["hint"] = "Lower strategy.micro_batch, set strategy.recompute=full, or see: tercet plan RECIPE"
        if no_host_memory and (limit := memory_limit(int(os.environ.get("WORLD_SIZE", "1")))):
            content["hint"] += f". Host memory is limited to {show_bytes(limit.bytes)} by {limit.source}"
    return content


def run_as_rank(
    recipe: Recipe,
    run: RunFolder,
    number: int,
    stop: Stop,
    join: Callable[[], World],
    unwritten: Callable[[dict[str, Any]], None],
    watched: str | None = None,
    started_by: str | None = None,
    accept_changed_data: bool = False,
) -> int:
    """Run this process's rank to its end and return the exit code; errors are reported, not raised.

    `unwritten` is called with the report of an error when the disk does not take it.
    `watched`: FIRST:COUNT, steps whose share of communication goes into the run folder (tercet bench).
    `started_by`: whom to name as having started the ranks; None when that was told before.
    """
    me = Rank(run, number)
    if started_by is None and number == 0:  # no supervisor of ours is there to say it
        stop.first = me.say_stopping
    try:
        from tercet.parallel.world import close_world
        from tercet.probe.communication import Watch
        from tercet.training.record import safe_console, write_json
        from tercet.training.run import run_rank

        watch = Watch(*map(int, watched.split(":"))) if watched is not None else None

        def at(step: int, rows: list[int]) -> None:
            me.at(step, rows)
            if watch is not None:
                watch.at(step)

        world = join()
        require_planned_device(run.read_plan() or {}, world.device.type)
        console = safe_console(me.console) if number == 0 else None
        if started_by is not None:
            devices, hosts = zip(*world.gather((str(world.device), socket.gethostname())), strict=True)
            if console is not None:
                console.print(how_started(started_by, devices, hosts), markup=False, highlight=False, soft_wrap=True)
        run_rank(recipe, run, world, stop, console, at, accept_changed_data)
        if watch is not None:
            write_json(run.path / "communication.json", {"share": watch.share})
        close_world(world)
        return 0
    except BaseException as error:
        return me.report(error, unwritten)
    finally:
        me.give_back()


def leave_at_once() -> None:
    os._exit(InterruptedRun.exit_code)


def main() -> None:
    """`python -m tercet.training.rank …`, started by the supervisor with the rank's numbers set."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("store")
    parser.add_argument("parent", type=int)
    parser.add_argument("told", type=int, help="the supervisor's pipe")
    parser.add_argument("--watch")
    parser.add_argument("--accept-changed-data", action="store_true")
    given = parser.parse_args()
    die_with_parent(given.parent)
    os.set_inheritable(given.told, False)
    stop = Stop(again=leave_at_once)
    stop.install()
    run = RunFolder(given.run)
    recipe = load_run_recipe(run.recipe)

    def join() -> World:
        from tercet.parallel.world import open_world

        return open_world(recipe.train.collective_timeout_seconds, given.store)

    code = run_as_rank(
        recipe,
        run,
        int(os.environ["RANK"]),
        stop,
        join,
        partial(tell, given.told),
        given.watch,
        started_by="tercet train",
        accept_changed_data=given.accept_changed_data,
    )
    # Not sys.exit: after a broken collective, library threads may never join.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
