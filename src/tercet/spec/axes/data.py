"""Data parallel, described: the buckets in which gradients travel. Twin of parallel/data.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tercet.spec.axes.traffic import Collective

if TYPE_CHECKING:
    from tercet.spec.counts import Counts

BUCKET_BYTES = 25 * 10**6  # large enough to use a link well, small enough to start before backward ends


def buckets(sizes: Sequence[int], bytes_per_element: float = 4) -> list[tuple[int, int]]:
    """Cut consecutive parameters of `sizes` elements into buckets; return (begin, end) element ranges.

    A parameter is never cut, so a bucket may exceed BUCKET_BYTES by less than one parameter.
    """
    found, begin, end = [], 0, 0
    for size in sizes:
        end += size
        if (end - begin) * bytes_per_element >= BUCKET_BYTES:
            found.append((begin, end))
            begin = end
    return found + ([(begin, end)] if end > begin else [])


def traffic(counts: Counts, bytes_per_element: float = 4) -> list[Collective]:
    """Return the collectives of one optimizer step for zero 0: each bucket once, however many micro-batches."""
    payload = bytes_per_element * counts.parameters
    return [Collective("all_reduce", "gradients", counts.buckets(bytes_per_element), payload)]
