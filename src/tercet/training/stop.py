"""Stopping on request: SIGTERM and SIGINT. The first asks, the second ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tercet.errors import InterruptedRun


class Stop:
    """`requested` is looked at by the loop at its safe points, where all ranks agree on it."""

    def __init__(self) -> None:
        self.requested = False
        self._interruptible = False

    def install(self) -> None:
        """Take over SIGTERM and SIGINT; call in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            os._exit(InterruptedRun.exit_code)
        self.requested = True
        if self._interruptible:
            raise InterruptedRun("stopped before the first step; there was nothing to save")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """While nothing has been trained that could be lost, a signal ends the run where it stands."""
        if self.requested:
            raise InterruptedRun("stopped before the first step; there was nothing to save")
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False
