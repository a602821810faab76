"""The rows of one parameter that this rank updates. What optimizer, clipping and checkpoints work on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tercet.spec.model import Tensor as Description
from tercet.spec.placement import Region


@dataclass
class ParameterShard:
    """`value` (region.rows, …), a leaf that the optimizer steps: fp32, or bf16 where no master stands beside it. Its
    `.grad`, fp32, is set before each update."""

    description: Description
    region: Region
    value: Tensor

    def __post_init__(self) -> None:
        if self.value.dtype != torch.float32:
            self.value.grad_dtype = torch.float32  # type: ignore[attr-defined]

    @property
    def name(self) -> str:
        return self.description.name
