"""Part: the rows of one parameter that this rank updates. What optimizer, clipping and checkpoints work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.spec.model import Tensor as Description
from tercet.spec.placement import region


def chunk_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (begin, end) of a rank's rows as torch.chunk and Shard(0) cut them: 64 over 3 is 22, 22, 20."""
    where = region(rows, ranks, rank)
    return where.begin, where.end


@dataclass
class Part:
    """`value` (end - begin, …), a leaf that the optimizer steps: fp32, or bf16 where no master stands beside it. Its
    `.grad`, fp32, is set before each update."""

    description: Description
    begin: int
    end: int
    value: Tensor

    def __post_init__(self) -> None:
        if self.value.dtype != torch.float32:
            self.value.grad_dtype = torch.float32  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        return self.description.name
