"""One rank as a process: its log file, its life bound to its parent's, its error as a file for the supervisor."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tercet.errors import InterruptedRun, TercetError
from tercet.spec.recipe import Recipe, load_recipe
from tercet.spec.run_folder import RunFolder
from tercet.training.launcher import how_started
from tercet.training.stop import Stop

if TYPE_CHECKING:
    from tercet.parallel.world import World

PARENT_POLL_SECONDS = 0.5
STACK_SIGNAL = signal.SIGUSR1  # the supervisor asks a rank that does not answer for its stack


def die_with_parent() -> None:
    """End this process when its parent ends, however that happens (SIGKILL included)."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:  # other systems, and a parent that ended before the line above
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def error_file(run: RunFolder, rank: int) -> Path:
    return run.logs / f"error-rank-{rank}.json"


class Rank:
    """Where this rank is, for its error report; and its console and log."""

    def __init__(self, run: RunFolder, rank: int):
        self.run, self.rank = run, rank
        self.step, self.rows = 0, []
        run.logs.mkdir(parents=True, exist_ok=True)
        # What anything prints (C++ included) goes to the rank's log; the console is kept for rank 0's lines.
        sys.stdout.flush()
        sys.stderr.flush()
        self.console_file = os.fdopen(os.dup(2), "w", encoding=sys.stderr.encoding, errors="replace", buffering=1)
        log = os.open(run.log_of(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.close(log)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(sys.stderr)
        faulthandler.register(STACK_SIGNAL, sys.stderr)
        # Warnings of any rank reach the user, with the rank's number; everything else stays in its log.
        warnings = logging.StreamHandler(self.console_file)
        warnings.setLevel(logging.WARNING)
        warnings.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
        logging.getLogger("tercet").addHandler(warnings)
        print(f"rank {rank}: process {os.getpid()} started {time.strftime('%F %T')}", flush=True)

    def at(self, step: int, rows: list[int]) -> None:
        self.step, self.rows = step, rows

    def report(self, error: BaseException) -> dict[str, Any]:
        """Return the error as data and leave it as a file; the log gets the traceback."""
        traceback.print_exception(error)
        content = {
            "rank": self.rank,
            "time": time.time(),
            "step": self.step,
            "rows": self.rows,
            **describe_error(error),
        }
        write_error(error_file(self.run, self.rank), content)
        return content


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
        }
    content = {
        "message": f"{type(error).__name__}: {error}",
        "hint": None,
        "exit_code": 1,
        "interrupted": False,
        "echo": is_collective_failure(error),
    }
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        content["message"] = f"out of memory: {error}"
        content["hint"] = "Lower strategy.micro_batch, set strategy.recompute=full, or see: tercet plan RECIPE"
    return content


def write_error(path: Path, content: dict[str, Any]) -> None:
    from tercet.training.record import write_json

    try:
        write_json(path, content)
    except OSError:  # a full disk: the log and the exit code must do
        print(content, flush=True)


def run_as_rank(
    recipe: Recipe,
    run: RunFolder,
    number: int,
    stop: Stop,
    join: Callable[[], World],
    watched: str | None = None,
    started_by: str | None = None,
) -> int:
    """Run this process's rank to its end and return the exit code; errors are reported, not raised.

    `watched`: FIRST:COUNT, steps whose share of communication goes into the run folder (tercet bench).
    `started_by`: whom to name as having started the ranks; None when that was told before.
    """
    me = Rank(run, number)
    at = me.at
    try:
        if watched is not None:
            from tercet.probe.communication import Watch

            watch = Watch(*map(int, watched.split(":")))

            def at(step: int, rows: list[int]) -> None:
                me.at(step, rows)
                watch.at(step)

        from tercet.parallel.world import close_world
        from tercet.training.record import safe_console
        from tercet.training.run import run_rank

        world = join()
        console = safe_console(me.console_file) if number == 0 else None
        if started_by is not None:
            devices, hosts = zip(*world.gather((str(world.device), socket.gethostname())), strict=True)
            if console is not None:
                console.print(how_started(started_by, devices, hosts), markup=False, highlight=False, soft_wrap=True)
        run_rank(recipe, run, world, stop, console, at)
        if watched is not None:
            from tercet.training.record import write_json

            write_json(run.path / "communication.json", {"share": watch.share})
        close_world(world)
        return 0
    except BaseException as error:
        return int(me.report(error)["exit_code"])


def main() -> None:
    """`python -m tercet.training.rank RUN STORE_FILE`, started by the supervisor with the rank's numbers set."""
    die_with_parent()
    stop = Stop()
    stop.install()
    run = RunFolder(Path(sys.argv[1]))
    recipe = load_recipe(run.recipe)

    def join() -> World:
        from tercet.parallel.world import open_world

        return open_world(recipe.train.collective_timeout_seconds, sys.argv[2])

    code = run_as_rank(recipe, run, int(os.environ["RANK"]), stop, join, *sys.argv[3:], started_by="tercet train")
    # Not sys.exit: after a broken collective, library threads may never join.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
