"""Writing that ranks agree on, and one policy for a full disk: output.disk_full, for every byte that a run saves.

Whatever a rank does here, alone or beside the others, ends in an exchange that all ranks enter (World.meet): so all
know what failed and where, all decide alike, and nobody waits for a rank that has gone another way.
"""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.errors import RunError, TercetError
from tercet.parallel.world import World, is_collective_failure
from tercet.spec.run_folder import RunFolder
from tercet.training.record import FULL
from tercet.units import show_bytes

POLL_SECONDS = 2.0  # between two looks at a full disk
LONGEST_PAUSE_SECONDS = 60.0  # between two attempts that each ran into a full disk
REPLACED = ".replaced"  # in the name of what a new folder takes the place of


@dataclass(frozen=True)
class Problem:
    """Why a write failed. `full`: the disk had no space, so it may succeed later."""

    rank: int
    full: bool
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


def problem_of(error: Exception, rank: int) -> Problem:
    """Return what went wrong on this rank, as data for the others."""
    if is_collective_failure(error):  # another rank has ended: there is nobody to agree with
        raise error
    if isinstance(error, OSError):
        return Problem(rank, error.errno in FULL, str(error))
    if isinstance(error, TercetError):
        return Problem(rank, False, error.message)
    return Problem(rank, False, f"{type(error).__name__}: {error}")


def agreed(world: World, work: Callable[[], Any], only: int | None = None) -> tuple[list[Any], Problem | None]:
    """Do `work` on every rank, or on rank `only`; return each rank's result and what went wrong, alike everywhere.

    Ranks wait for the slowest without a clock. Of several problems the first that is not a full disk is returned.
    """
    result, problem = None, None
    if only is None or only == world.rank:
        try:
            result = work()
        except Exception as error:
            traceback.print_exc()  # into this rank's log
            problem = problem_of(error, world.rank)
    outcomes = world.meet((result, problem))
    problems = sorted((p for _, p in outcomes if p is not None), key=lambda p: p.full)
    return [r for r, _ in outcomes], problems[0] if problems else None


class Disk:
    """Every rank has one and calls the same methods in the same order. Raises RunError, on all ranks alike."""

    def __init__(
        self,
        run: RunFolder,
        world: World,
        policy: str,
        say: Callable[[str], None],
        stop_requested: Callable[[], bool],
    ):
        """`policy`: output.disk_full, wait or stop."""
        self._run, self._world, self._policy = run, world, policy
        self._say, self._stop_requested = say, stop_requested

    def write(
        self, what: str, needed_bytes: int, attempt: Callable[[int], Problem | None], begun: bool = False
    ) -> None:
        """Call attempt(0), attempt(1), … until it returns no problem; before each there must be room for `what`.

        An attempt publishes only what is whole; what a failed one leaves behind is removed. `begun`: the first
        attempt only ends what was begun earlier. Raises RunError when anything but a full disk stops it, or by policy.
        """
        number, pause = 0, POLL_SECONDS
        while True:
            if number or not begun:
                self.wait_for_space(what, needed_bytes)
            problem = attempt(number)
            if problem is None:
                return
            if self._world.rank == 0:
                remove_leftovers(self._run)
            if not problem.full:
                raise RunError(
                    f"{what} could not be written: {problem}",
                    f"What was saved before is unharmed. Continue with: {self._run.resume}",
                )
            if self._policy == "stop" or any(self._world.meet(self._stop_requested())):
                raise self._full(what, needed_bytes)
            self._say(f"disk full: {what} was given up in the middle ({problem}); trying again")
            time.sleep(pause)
            number, pause = number + 1, min(2 * pause, LONGEST_PAUSE_SECONDS)

    def wait_for_space(self, what: str, needed_bytes: int) -> None:
        """Return when the disk has room for `what`; by policy wait for it or raise RunError."""
        said = False
        while True:
            if self._world.rank == 0:
                remove_leftovers(self._run)  # they may be what fills the disk
            # One rank looks, so that all see one figure.
            (free, *_), problem = agreed(self._world, self._free, only=0)
            if problem is not None:
                raise RunError(f"{what} could not be written: {problem}")
            if free >= needed_bytes:
                return
            if self._policy == "stop" or any(self._world.meet(self._stop_requested())):
                raise self._full(what, needed_bytes)
            if not said:
                short = self._shortage(what, needed_bytes)
                self._say(f"{short}; waiting until there is space (Ctrl-C stops without saving)")
                said = True
            time.sleep(POLL_SECONDS)

    def _free(self) -> int:
        return shutil.disk_usage(self._run.path).free

    def _shortage(self, what: str, needed_bytes: int) -> str:
        return (
            f"disk full: {what} needs {show_bytes(needed_bytes)}, {show_bytes(self._free())} are free "
            f"in {self._run.path}"
        )

    def _full(self, what: str, needed_bytes: int) -> RunError:
        return RunError(
            self._shortage(what, needed_bytes),
            f"What was saved before is unharmed. Free some space, then: {self._run.resume}",
        )


def remove_leftovers(run: RunFolder) -> None:
    """Remove what a save that failed or was killed has left behind under temporary names. Rank 0 alone."""
    trained = [path.with_name(f".{path.name}{end}.tmp") for path in (run.model, run.adapter) for end in ("", REPLACED)]
    for leftover in (*run.checkpoints.glob(".step-*.tmp"), *trained):
        named = leftover.with_name(leftover.name[1:].removesuffix(f"{REPLACED}.tmp"))
        with suppress(OSError):  # then the next attempt says what stands in the way
            if leftover.name.endswith(f"{REPLACED}.tmp") and leftover.exists() and not named.exists():
                leftover.rename(named)  # a kill between publish's two renames: what was there stays
            elif leftover.exists():
                shutil.rmtree(leftover)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file; when this returns its bytes are on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish(temporary: Path, final: Path) -> None:
    """Give a complete folder its name; what had that name before stays until then. Files must be synced already."""
    sync_folder(temporary)
    if final.exists():
        replaced = final.with_name(f".{final.name}{REPLACED}.tmp")
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        temporary.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        temporary.rename(final)
    sync_folder(final.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
