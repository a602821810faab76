"""An evaluation shared out to several processes: each computes its rows, the sums are added here. Nothing is exchanged
meanwhile, so no rank waits for another."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tercet import children
from tercet.errors import TercetError
from tercet.inference.evaluate import Progress, Sums, Work, add_up, total


def evaluate(work: Work, ranks: int = 1, progress: Progress = lambda rows: None) -> Sums:
    """Return the sums over all rows. Raises what the first rank that failed raised; no process is left behind."""
    if ranks == 1:
        return add_up(work, progress=progress)
    with tempfile.TemporaryDirectory(prefix="tercet-") as folder:
        started = [_Rank(work, rank, ranks, Path(folder), progress) for rank in range(ranks)]
        try:
            for rank in started:
                rank.listen()
            for rank in started:
                rank.wait_for(started)
        finally:
            for rank in started:
                rank.end()
    failed = [rank for rank in started if not isinstance(rank.found, Sums)]
    if failed:
        # One that was ended because another had failed has nothing to say.
        raise next((r.found for r in failed if isinstance(r.found, TercetError)), failed[0].silent())
    return total([rank.found for rank in started if isinstance(rank.found, Sums)])


class _Rank:
    def __init__(self, work: Work, rank: int, ranks: int, folder: Path, progress: Progress):
        self.rank, self.found, self._progress = rank, None, progress
        threads = str(max(1, (os.cpu_count() or 1) // ranks))
        self._log = (folder / f"rank-{rank}.log").open("w+b")
        self.process = subprocess.Popen(
            children.command("tercet.inference.evaluate_ranks"),
            env={"OMP_NUM_THREADS": threads, **children.environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump((work, rank, ranks), self.process.stdin)
            self.process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)

    def listen(self) -> None:
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(EOFError, OSError, pickle.UnpicklingError):
            while not isinstance(self.found, (Sums, TercetError)):
                said: Any = pickle.load(self.process.stdout)  # of our own process
                if isinstance(said, int):
                    self._progress(said)
                else:
                    self.found = said

    def wait_for(self, others: list[_Rank]) -> None:
        """Return when this rank has answered, or any has failed: the others' work is then for nothing."""
        while self._reader.is_alive():
            self._reader.join(0.1)
            if any(not r._reader.is_alive() and not isinstance(r.found, Sums) for r in others):
                return

    def end(self) -> None:
        if not isinstance(self.found, Sums):
            self.process.kill()
        self.process.wait()
        if self._reader.ident is not None:
            self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def silent(self) -> TercetError:
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        return TercetError(
            f"rank {self.rank} of the evaluation ended with code {self.process.returncode}"
            + (f": {last[0]}" if last else "")
        )


def main() -> None:
    """Read (work, rank, ranks); write the rows done, one number a batch, and at the end the sums or an error."""
    work, rank, ranks = pickle.load(sys.stdin.buffer)
    out = sys.stdout.buffer

    def say(what: Any) -> None:
        pickle.dump(what, out)
        out.flush()

    try:
        say(add_up(work, rank, ranks, say))
    except TercetError as error:
        say(error)


if __name__ == "__main__":
    main()
