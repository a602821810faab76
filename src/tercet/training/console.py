"""The console of a run, which may close, hang or vanish without touching the run."""

from __future__ import annotations

import io
import os
import select
import stat
import threading
from queue import SimpleQueue
from typing import TextIO

WAITING_LINES = 1000  # for a console that does not take them (a paused terminal); later ones go to the log
DRAIN_SECONDS = 2.0


def _is_null(descriptor: int) -> bool:
    found, null = os.fstat(descriptor), os.stat(os.devnull)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == null.st_rdev


class ConsoleFile(io.TextIOBase):
    """A text file over a descriptor that never raises and never blocks its writer.

    A thread does the writing. What a console does not take, because it is gone (a closed terminal, `| head`), paused or
    the null device, goes to `log`.
    """

    def __init__(self, descriptor: int, encoding: str | None = None, log: TextIO | None = None):
        self._descriptor, self._encoding, self._log = descriptor, encoding or "utf-8", log
        self._gone = _is_null(descriptor)
        # Not Queue: a signal's handler may write too, in the middle of another write.
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        threading.Thread(target=self._serve, name="console", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return not self._gone and os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, text: str) -> int:
        if self._gone or self._queue.qsize() > WAITING_LINES:
            self._to_log(text)
        else:
            self._queue.put(text.encode(self._encoding, "replace"))
        return len(text)

    def flush(self) -> None:
        pass  # the thread writes without a buffer

    def say(self, text: str) -> None:
        self.write(f"{text}\n")

    def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until everything is written, at most so long: call before the process ends."""
        done = threading.Event()
        self._queue.put(done)
        done.wait(seconds)

    def _serve(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
            elif self._gone:
                self._to_log(item.decode(self._encoding, "replace"))
            else:
                self._write_all(item)

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:  # somebody who shares the terminal made it so
                select.select([], [self._descriptor], [], 1.0)
            except OSError:
                self._gone = True
                self._to_log(data.decode(self._encoding, "replace"))
                return

    def _to_log(self, text: str) -> None:
        if self._log is not None:
            try:
                self._log.write(text)
                self._log.flush()
            except (OSError, ValueError):  # a full disk: the console is gone and so is the line
                pass
