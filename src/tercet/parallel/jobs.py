"""Work of the host beside the card's: sums of gradients, updates of weights. In order, each when it is needed or before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

Job = Callable[[], None]


class Jobs:
    """Jobs in the order given. Here each runs when it is waited for: on a CPU nothing is won by doing it earlier."""

    def __init__(self) -> None:
        self._waiting: deque[Job] = deque()
        self._given = self._done = 0

    def add(self, job: Job, after: Any = None, moved: float = 0.0, updates: float = 0.0) -> int:
        """Take a job; return its number.

        What a rehearsal times it by: the card's event that it waits for, bytes through the host's memory, and
        parameters updated.
        """
        self._waiting.append(job)
        self._given += 1
        return self._given

    def wait(self, number: int | None = None) -> None:
        """Return when job `number`, or every job given, is done; raises what a job raised."""
        wanted = self._given if number is None else number
        while self._done < wanted:
            self._waiting.popleft()()
            self._done += 1


class ThreadedJobs(Jobs):
    """Jobs that a thread does while the card computes."""

    def __init__(self) -> None:
        super().__init__()
        self._change = threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._work, name="host jobs", daemon=True).start()

    def add(self, job: Job, after: Any = None, moved: float = 0.0, updates: float = 0.0) -> int:
        with self._change:
            number = super().add(job)
            self._change.notify_all()
        return number

    def wait(self, number: int | None = None) -> None:
        with self._change:
            wanted = self._given if number is None else number
            self._change.wait_for(lambda: self._done >= wanted or self._error is not None)
            if self._error is not None:
                raise self._error

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting))
                job = self._waiting.popleft()
            try:
                job()
            except BaseException as error:  # raised again where it is waited for
                with self._change:
                    self._error = error
                    self._change.notify_all()
                return
            with self._change:
                self._done += 1
                self._change.notify_all()
