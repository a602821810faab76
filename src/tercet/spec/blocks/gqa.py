"""Grouped-query attention: `heads` queries share `kv_heads` keys and values, arXiv 2305.13245. Twin of model/gqa.py."""

from __future__ import annotations

from dataclasses import dataclass

from tercet.spec.blocks.cost import Kept, Matmul, matrices
from tercet.spec.model import Tensor


@dataclass(frozen=True)
class GQA:
    heads: int
    kv_heads: int
    head_dim: int
    bias: bool = False  # on queries, keys and values (Qwen2)
    output_bias: bool = False  # on the output projection (Llama's attention_bias sets both)
    qk_norm: bool = False  # RMS norm over each head of queries and keys before rotation (Qwen3)
    window: int | None = None  # a token sees at most this many tokens, itself included (Mistral)

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def tensors(self, prefix: str, width: int) -> tuple[Tensor, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found = []

        def matrix(name: str, rows: int, columns: int, axes: tuple[str, str], bias: bool) -> None:
            found.append(Tensor(f"{prefix}{name}.weight", (rows, columns), axes, "matrix"))
            if bias:
                found.append(Tensor(f"{prefix}{name}.bias", (rows,), axes[:1], "bias"))

        matrix("q_proj", q, width, ("heads", "width"), self.bias)
        matrix("k_proj", kv, width, ("kv_heads", "width"), self.bias)
        matrix("v_proj", kv, width, ("kv_heads", "width"), self.bias)
        matrix("o_proj", width, q, ("width", "heads"), self.output_bias)
        if self.qk_norm:
            found.append(Tensor(f"{prefix}q_norm.weight", (self.head_dim,), ("head_dim",), "norm"))
            found.append(Tensor(f"{prefix}k_norm.weight", (self.head_dim,), ("head_dim",), "norm"))
        return tuple(found)

    def flops(self, width: int, tokens: int, context: float) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        seen = context if self.window is None else min(context, self.window)
        projections = 2 * tokens * width * (2 * q + 2 * kv)
        scores_and_values = 4 * tokens * seen * q
        return int(projections + scores_and_values)

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Return the numbers per token that scores and values have, over all heads."""
        return self.heads * self.head_dim, self.heads * self.head_dim

    def matmuls(self, width: int) -> tuple[Matmul, ...]:
        return matrices(self.tensors("", width))

    def kept(self, width: int, grouped: bool = True) -> Kept:
        """Flash attention keeps queries, keys, values, its output and one number a head (arXiv 2205.14135)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        normed = q + kv if self.qk_norm else 0  # the norm's own input, besides the rotated row
        return Kept(
            inputs=width,
            outputs=2 * q + 2 * kv + normed,
            products=0,
            stats=self.heads + (self.heads + self.kv_heads if self.qk_norm else 0),
            elementwise=2 * (q + kv) + 2 * normed,
            selected=2 * q + 2 * kv + width,
            selected_stats=self.heads,
        )
