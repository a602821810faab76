"""What a card did over a step: memory by ledger row, what each stream was busy with, and what nothing hid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUCKETS = 400  # of time, in the picture: the fullest moment of each is kept
COPIES = ("copy to card", "copy to host")

Span = tuple[int, str, float, float]  # (lane, what, begin, end), seconds


@dataclass
class MemorySamples:
    """Keeps, for each bucket of `width` seconds from `begin` on, the moment of the most memory."""

    begin: float
    width: float
    most: dict[int, tuple[int, dict[str, int]]] = field(default_factory=dict)

    def note(self, seconds: float, allocated: int, held: dict[str, int]) -> None:
        bucket = int((seconds - self.begin) / self.width)
        if allocated > self.most.get(bucket, (-1, {}))[0]:
            self.most[bucket] = (allocated, {row: size for row, size in held.items() if size})

    def samples(self) -> list[dict[str, Any]]:
        """Return [{"seconds": since the step's begin, "rows": {row: bytes}}] in order of time."""
        return [{"seconds": n * self.width, "rows": rows} for n, (_, rows) in sorted(self.most.items())]


def kind_of(what: str) -> str:
    """Return whether a piece of work computes, copies over the host's link, or is a collective."""
    if what in COPIES:
        return "copies"
    return "compute" if "::" in what else "collectives"


def exposed(spans: list[Span], begin: float, end: float) -> dict[str, float]:
    """Return the seconds between `begin` and `end` by what the card was at: compute first, and what it did not hide.

    {"compute", "collectives", "copies", "host"}; "host": no stream had anything to do. They sum to end - begin.
    """
    edges: list[tuple[float, int, str]] = []
    for _, what, first, last in spans:
        if last > first:
            edges += [(first, 1, kind_of(what)), (last, -1, kind_of(what))]
    edges.sort(key=lambda edge: edge[0])
    running: dict[str, int] = dict.fromkeys(("compute", "collectives", "copies"), 0)
    found: dict[str, float] = dict.fromkeys((*running, "host"), 0.0)
    now = begin
    for at, change, kind in edges:
        until = min(max(at, begin), end)
        found[next((k for k, n in running.items() if n), "host")] += until - now
        now, running[kind] = until, running[kind] + change
    found["host"] += end - now
    return found


def busy(spans: list[Span], begin: float, gap: float) -> dict[int, list[tuple[float, float, str]]]:
    """Return, by lane, stretches (begin, end, kind) since the step's begin; pauses shorter than `gap` are drawn over."""
    found: dict[int, list[tuple[float, float, str]]] = {}
    for lane, what, first, last in sorted(spans, key=lambda span: span[2]):
        stretches, kind = found.setdefault(lane, []), kind_of(what)
        if stretches and stretches[-1][2] == kind and first - begin - stretches[-1][1] < gap:
            stretches[-1] = (stretches[-1][0], max(stretches[-1][1], last - begin), kind)
        else:
            stretches.append((first - begin, last - begin, kind))
    return found


def trace(
    spans: list[Span], lanes: list[str], samples: list[dict[str, Any]], begin: float, card: int = 0
) -> dict[str, Any]:
    """Return the step in the Trace Event Format, which Perfetto and chrome://tracing open; times in microseconds."""
    named = [{"ph": "M", "pid": card, "name": "process_name", "args": {"name": f"card {card} (simulated)"}}]
    named += [
        {"ph": "M", "pid": card, "tid": n, "name": "thread_name", "args": {"name": f"stream {name}"}}
        for n, name in enumerate(lanes)
    ]
    work = [
        {"ph": "X", "pid": card, "tid": lane, "name": what, "cat": kind_of(what),
         "ts": round(1e6 * (first - begin), 3), "dur": round(1e6 * (last - first), 3)}
        for lane, what, first, last in spans
    ]  # fmt: skip
    memory = [
        {"ph": "C", "pid": card, "name": "memory", "ts": round(1e6 * s["seconds"], 3), "args": s["rows"]}
        for s in samples
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *work, *memory]}
