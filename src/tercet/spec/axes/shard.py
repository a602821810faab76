"""Sharded data parallel, described: who holds which rows, and what is sent. Twin of parallel/shard.py.

ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) as FSDP2 runs it: one group per layer, and one for the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tercet.spec.axes.split import chunk
from tercet.spec.axes.traffic import Collective

if TYPE_CHECKING:
    from tercet.spec.counts import Counts


def split(rows: int, ranks: int) -> tuple[int, ...]:
    return chunk(rows, ranks)


def traffic(
    counts: Counts,
    ranks: int,
    zero: int,
    micro_batches: int,
    reduce_every: bool,
    weight_bytes: float,
    gradient_bytes: float = 4,
) -> list[Collective]:
    """Return the collectives of one optimizer step for zero 1 to 3; payloads padded as FSDP2 pads them.

    All shards of a tensor have the first one's size, so all ranks together store and send a little more than it has.
    """
    whole = counts.padded(ranks) * ranks
    groups = counts.blocks + 1
    gathers = 2 * micro_batches if zero == 3 else 1
    reductions = micro_batches if reduce_every else 1
    return [
        Collective("all_gather", "weights", groups * gathers, whole * gathers * weight_bytes),
        Collective("reduce_scatter", "gradients", groups * reductions, whole * reductions * gradient_bytes),
    ]
