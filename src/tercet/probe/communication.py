"""How much of a step its collectives take: from PyTorch's profiler, on one rank, over a few steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PREFIXES = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel")


def union_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of (begin, end) intervals: collectives may run beside each other."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > reached:
            total += end - max(begin, reached)
            reached = end
    return total


class Watch:
    """Called at the beginning of each step; profiles the steps [first, first + count).

    `share` is the part of these steps' time in which a collective was under way, waiting for slower ranks
    included and hidden behind computation or not; None until they are over.
    """

    def __init__(self, first: int, count: int):
        self._first, self._last, self._profiler = first, first + count, None
        self.share: float | None = None

    def at(self, step: int) -> None:
        if step == self._first:
            import torch

            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()
        elif step == self._last and self._profiler is not None:
            self._profiler.stop()
            self.share = _share(self._profiler.events())
            self._profiler = None


def _share(events: Any) -> float:
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    collectives = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(PREFIXES)]
    return union_seconds(collectives) / whole
