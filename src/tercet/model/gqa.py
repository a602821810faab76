"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245). Twin of spec/blocks/gqa.py."""

from __future__ import annotations

from torch import Tensor, nn

from tercet.model.attention import Documents, attend, attend_masked
from tercet.model.cache import Cache
from tercet.model.linear import Joined, Linear, join
from tercet.model.norm import RMSNorm
from tercet.model.rope import Table, rotate
from tercet.spec.blocks.gqa import GQA
from tercet.spec.model import Model


class Attention(nn.Module):
    """x (batch, tokens, width) -> the same shape."""

    def __init__(self, spec: GQA, model: Model):
        super().__init__()
        width = model.width
        self.head_dim, self.window = spec.head_dim, spec.window
        self.attend = attend  # a seam: what goes around it from outside is not this room's business
        self.q_proj = Linear(width, spec.heads * spec.head_dim, bias=spec.bias)
        self.k_proj = Linear(width, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.v_proj = Linear(width, spec.kv_heads * spec.head_dim, bias=spec.bias)
        self.o_proj = Linear(spec.heads * spec.head_dim, width, bias=spec.output_bias)
        self.q_norm = RMSNorm(spec.head_dim, model.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, model.norm_eps) if spec.qk_norm else None
        self.joined: Joined | None = None  # q, k and v, where `join` was called

    def join(self) -> None:
        """Compute q, k and v as one product from now on. The module must not move any more."""
        self.joined = join((self.q_proj, self.k_proj, self.v_proj))

    def forward(
        self, x: Tensor, table: Table, documents: Documents | None = None, cache: Cache | None = None
    ) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        found = (self.q_proj(x), self.k_proj(x), self.v_proj(x)) if self.joined is None else self.joined(x)
        q, k, v = (part.view(shape) for part in found)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, table), rotate(k, table)
        if cache is not None:
            k, v = cache.add("k", k), cache.add("v", v)
            if (mask := cache.mask(self.window)) is not None:
                return self.o_proj(attend_masked(q, k, v, mask, self.head_dim**-0.5).flatten(2))
        out = self.attend(q, k, v, documents, self.head_dim**-0.5, self.window)
        return self.o_proj(out.flatten(2))
