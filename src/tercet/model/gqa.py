"""Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245). Twin of spec/blocks/gqa.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tercet.model.attention import Documents, attend
from tercet.model.rope import rotate
from tercet.spec.blocks.gqa import GQA

Cache = dict[str, Tensor]  # key and value of the tokens so far, (batch, tokens, kv_heads, head_dim)


class Attention(nn.Module):
    """x (batch, tokens, width) -> the same shape."""

    def __init__(self, spec: GQA, width: int):
        super().__init__()
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(width, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(width, spec.kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.head_dim, width, bias=False)

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], documents: Documents | None = None, cache: Cache | None = None
    ) -> Tensor:
        shape = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_proj(x).view(shape), table)
        k = rotate(self.k_proj(x).view(shape), table)
        v = self.v_proj(x).view(shape)
        if cache is not None:
            if cache:
                k, v = torch.cat((cache["k"], k), 1), torch.cat((cache["v"], v), 1)
            cache["k"], cache["v"] = k, v
        out = attend(q, k, v, documents, self.head_dim**-0.5)
        return self.o_proj(out.flatten(2))
