"""Stopping on request: SIGTERM, SIGINT and SIGHUP. The first asks; another Ctrl-C or SIGTERM discards."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from tercet.errors import InterruptedRun

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOGETHER_SECONDS = 0.3  # launchers and closing terminals send several at a time: they count as one


class Stop:
    """`requested` is looked at at safe points (in the loop: where all ranks agree on it).

    A closed terminal's SIGHUP asks, and never discards: shell, kernel and terminal may each send one. `first` and
    `again` are called in the signal's handler; `again` when what is being finished is to be given up.
    """

    def __init__(self, first: Callable[[], None] | None = None, again: Callable[[], None] | None = None) -> None:
        self.requested = False
        self.discarded = False
        self.first, self._again = first, again
        self._interruptible = False
        self._asked_at: float | None = None  # by a person: of the first Ctrl-C or SIGTERM
        self._before: dict[signal.Signals, object] = {}

    def install(self) -> None:
        """Take over the signals; does nothing outside the main thread, where Python allows no handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: a closed terminal is to change nothing
            self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back to whom they belonged.

        After a request the process is on its way out: what would only kill it, before it has told where the run
        continues, is ignored.
        """
        for number, handler in self._before.items():
            kills = handler in (signal.SIG_DFL, signal.default_int_handler)
            signal.signal(number, signal.SIG_IGN if self.requested and kills else handler)  # type: ignore[arg-type]
        self._before.clear()

    @contextmanager
    def installed(self) -> Iterator[Stop]:
        self.install()
        try:
            yield self
        finally:
            self.restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number != signal.SIGHUP:
            if self._asked_at is not None and now - self._asked_at > TOGETHER_SECONDS:
                self.discarded = True
                if self._again is not None:
                    self._again()
            self._asked_at = self._asked_at or now
        if self.requested:
            return
        self.requested = True
        if self.first is not None:
            self.first()
        if self._interruptible:
            raise _before_the_first_step()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While nothing has been trained that could be lost, a signal ends the run where it stands."""
        if self.requested:
            raise _before_the_first_step()
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False
        if self.requested:  # the exception was lost in somebody's callback
            raise _before_the_first_step()


def _before_the_first_step() -> InterruptedRun:
    return InterruptedRun("stopped before the first step; there was nothing to save")
