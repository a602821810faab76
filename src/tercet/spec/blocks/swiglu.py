"""SwiGLU feed-forward: down(silu(gate(x)) * up(x)), Shazeer 2020, arXiv 2002.05202. Twin of model/swiglu.py."""

from __future__ import annotations

from dataclasses import dataclass

from tercet.spec.model import Tensor


@dataclass(frozen=True)
class SwiGLU:
    ffn: int

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        return (
            Tensor(f"{prefix}gate_proj.weight", (self.ffn, width), ("ffn", "width"), "matrix"),
            Tensor(f"{prefix}up_proj.weight", (self.ffn, width), ("ffn", "width"), "matrix"),
            Tensor(f"{prefix}down_proj.weight", (width, self.ffn), ("width", "ffn"), "matrix"),
        )

    def flops(self, width: int, tokens: int, context: float) -> int:
        return 2 * tokens * width * self.ffn * 3
