"""SwiGLU feed-forward: down(silu(gate(x)) * up(x)), Shazeer 2020, arXiv 2002.05202. Twin of model/swiglu.py."""

from __future__ import annotations

from dataclasses import dataclass

from tercet.spec.blocks.cost import Kept, Matmul, matrices
from tercet.spec.model import Tensor


@dataclass(frozen=True)
class SwiGLU:
    ffn: int
    bias: bool = False

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        found = []
        for name, rows, columns, axes in (
            ("gate_proj", self.ffn, width, ("ffn", "width")),
            ("up_proj", self.ffn, width, ("ffn", "width")),
            ("down_proj", width, self.ffn, ("width", "ffn")),
        ):
            found.append(Tensor(f"{prefix}{name}.weight", (rows, columns), axes, "matrix"))
            if self.bias:
                found.append(Tensor(f"{prefix}{name}.bias", (rows,), axes[:1], "bias"))
        return tuple(found)

    def flops(self, width: int, tokens: int, context: float) -> int:
        return 2 * tokens * width * self.ffn * 3

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        return matrices(self.tensors("", width))

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """gate and up, and their product, which the last matmul reads; silu(gate) is made again in backward."""
        return Kept(
            inputs=width,
            outputs=2 * self.ffn,
            products=self.ffn,
            stats=0,
            elementwise=3 * self.ffn,
            selected=2 * self.ffn + width,
        )
