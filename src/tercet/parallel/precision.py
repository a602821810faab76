"""Number formats of a run: what is computed in, and whether fp32 masters stand beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`compute`: type of weights in matmuls and of activations. Optimizer and gradients are always fp32."""

    name: str
    compute: torch.dtype

    @property
    def has_master(self) -> bool:
        return self.compute != torch.float32


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
}
