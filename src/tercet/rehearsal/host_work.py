"""The host's work beside the card's, in simulated time: a thread that takes jobs in order."""

from __future__ import annotations

from typing import Any

from tercet.parallel.jobs import Job, Jobs
from tercet.rehearsal.timeline import Timeline


class HostWork(Jobs):
    """Jobs that end when a thread of the host would have done them. `memory`, `updates`: this rank's share of the
    host's bytes and parameters per second."""

    def __init__(self, timeline: Timeline, memory: float, updates: float):
        super().__init__()
        self._timeline, self._memory, self._updates = timeline, memory, updates
        self._ends: list[float] = []

    def add(self, job: Job, after: Any = None, moved: float = 0.0, updates: float = 0.0) -> int:
        begin = max(self._timeline.host_seconds, self._ends[-1] if self._ends else 0.0)
        if after is not None:
            begin = max(begin, after.seconds)
        self._ends.append(begin + moved / self._memory + updates / self._updates)
        return super().add(job, after, moved, updates)

    def wait(self, number: int | None = None) -> None:
        super().wait(number)
        done = len(self._ends) if number is None else number
        if done:
            self._timeline.host_seconds = max(self._timeline.host_seconds, self._ends[done - 1])
