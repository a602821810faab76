"""Number formats of a run: what is computed in, and whether fp32 masters stand beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    """`compute`: type of weights in matmuls and of activations; `kept`: of the weights that are updated, the masters
    where it is another. Gradients are always fp32."""

    name: str
    compute: torch.dtype
    kept: torch.dtype = torch.float32

    @property
    def has_master(self) -> bool:
        return self.compute != self.kept


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
    "bf16-pure": Precision("bf16-pure", torch.bfloat16, torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
}
