"""Streams and events of a simulated card: what is known to be finished where, and when it would be.

Each stream counts what is queued on it. A vector clock says, for each stream, up to which count every other stream's
work is known to be finished before what comes next: recording an event takes a snapshot, waiting for it merges it
(Lamport 1978; Mattern 1988). Whatever reads a tensor must know its last writer; whatever writes it or takes its
memory again must know its readers too. Times are seconds of the simulated clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[int, int]  # stream number -> count known to be finished

HOST = -1  # the host's own place in a vector clock


def merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if count > into.get(stream, 0):
            into[stream] = count


@dataclass
class Lane:
    """One stream of one card. `seconds`: when its last piece of work ends."""

    number: int
    name: str
    count: int = 0
    seconds: float = 0.0
    known: Clock = field(default_factory=dict)


@dataclass
class EventMark:
    """What an event remembers of the stream that it was recorded on."""

    known: Clock
    seconds: float


@dataclass
class Use:
    """A piece of work that touched a tensor: where, as which count of its lane, and what it was."""

    lane: int
    count: int
    what: str


@dataclass
class History:
    """Who wrote a tensor's memory last, and who has read it since."""

    writer: Use | None = None
    readers: dict[int, Use] = field(default_factory=dict)


class OrderError(RuntimeError):
    """Two pieces of work touch the same memory and nothing orders them."""


class Timeline:
    """The lanes of one card and the host's knowledge of them."""

    def __init__(self, card: int):
        self.card = card
        self.lanes = [Lane(0, "compute")]
        self.current = 0
        self.host_known: Clock = {}
        self.host_seconds = 0.0
        self.waits = 0  # times that the host waited for the card
        self.spans: list[tuple[int, str, float, float]] = []  # (lane, what, begin, end)
        self.record_spans = False

    def new_lane(self, name: str) -> Lane:
        lane = Lane(len(self.lanes), name)
        self.lanes.append(lane)
        return lane

    def launch(self, what: str, seconds: float, launch_seconds: float = 0.0) -> Use:
        """Queue a piece of work on the current lane; return its place. The host goes on at once."""
        lane = self.lanes[self.current]
        self.host_seconds += launch_seconds
        merge(lane.known, self.host_known)
        begin = max(lane.seconds, self.host_seconds)
        lane.seconds = begin + seconds
        lane.count += 1
        lane.known[lane.number] = lane.count
        if self.record_spans:
            self.spans.append((lane.number, what, begin, lane.seconds))
        return Use(lane.number, lane.count, what)

    def mark(self, lane: Lane) -> EventMark:
        return EventMark(dict(lane.known), lane.seconds)

    def wait(self, lane: Lane, mark: EventMark) -> None:
        merge(lane.known, mark.known)
        lane.seconds = max(lane.seconds, mark.seconds)

    def host_waits(self, mark: EventMark) -> None:
        self.waits += 1
        merge(self.host_known, mark.known)
        self.host_seconds = max(self.host_seconds, mark.seconds)

    def host_knows(self, mark: EventMark) -> bool:
        return all(self.host_known.get(lane, 0) >= count for lane, count in mark.known.items())

    def host_waits_for_all(self) -> None:
        self.waits += 1
        for lane in self.lanes:
            merge(self.host_known, lane.known)
            self.host_seconds = max(self.host_seconds, lane.seconds)

    def reads(self, history: History, use: Use, tensor: object) -> None:
        """Note that `use` reads; raises OrderError when the writer need not have finished."""
        self._ordered(history.writer, use, "reads", "written", tensor)
        history.readers[use.lane] = use

    def writes(self, history: History, use: Use, tensor: object) -> None:
        """Note that `use` writes; raises OrderError when the last writer or a reader need not have finished."""
        self._ordered(history.writer, use, "writes", "written", tensor)
        for reader in history.readers.values():
            self._ordered(reader, use, "writes", "read", tensor)
        history.writer, history.readers = use, {}

    def unfinished_elsewhere(self, history: History, lane: Lane) -> Use | None:
        """Return a use on another lane that `lane` need not have waited for, or None."""
        for use in (history.writer, *history.readers.values()):
            if use is not None and use.lane != lane.number and not self._knows(lane.known, use):
                return use
        return None

    def knows(self, lane: Lane, use: Use) -> bool:
        """Return whether `use` has ended before what comes next on `lane`."""
        return use.lane == lane.number or self._knows(lane.known, use)

    def _knows(self, known: Clock, use: Use) -> bool:
        return max(known.get(use.lane, 0), self.host_known.get(use.lane, 0)) >= use.count

    def _ordered(self, earlier: Use | None, use: Use, does: str, was: str, tensor: object) -> None:
        if earlier is None or earlier.lane == use.lane or self._knows(self.lanes[use.lane].known, earlier):
            return
        raise OrderError(
            f"card {self.card}: {use.what} on stream {self.lanes[use.lane].name} {does} {tensor}, which is still being "
            f"{was} by {earlier.what} on stream {self.lanes[earlier.lane].name}: no event orders the two"
        )
