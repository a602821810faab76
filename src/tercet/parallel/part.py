"""Part: the rows of one parameter that this rank updates. What optimizer, clipping and checkpoints work on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tercet.spec.model import Tensor as Description
from tercet.spec.placement import region


def chunk_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's rows as torch.chunk and Shard(0) cut them: 64 over 3 is 22, 22, 20."""
    where = region(rows, ranks, rank)
    return where.begin, where.end


@dataclass
class Part:
    """`value` is fp32 (end - begin, …), a leaf that the optimizer steps; `.grad` is set before each update."""

    description: Description
    begin: int
    end: int
    value: Tensor

    @property
    def name(self) -> str:
        return self.description.name
