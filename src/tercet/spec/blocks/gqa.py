"""Grouped-query attention: `heads` queries share `kv_heads` keys and values. Twin of model/gqa.py."""

from __future__ import annotations

from dataclasses import dataclass

from tercet.spec.model import Tensor


@dataclass(frozen=True)
class GQA:
    heads: int
    kv_heads: int
    head_dim: int

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            Tensor(f"{prefix}q_proj.weight", (q, width), ("heads", "width"), "matrix"),
            Tensor(f"{prefix}k_proj.weight", (kv, width), ("kv_heads", "width"), "matrix"),
            Tensor(f"{prefix}v_proj.weight", (kv, width), ("kv_heads", "width"), "matrix"),
            Tensor(f"{prefix}o_proj.weight", (width, q), ("width", "heads"), "matrix"),
        )

    def flops(self, width: int, tokens: int, context: float) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        projections = 2 * tokens * width * (2 * q + 2 * kv)
        scores_and_values = 4 * tokens * context * q
        return int(projections + scores_and_values)
