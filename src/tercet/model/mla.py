"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Twin of spec/blocks/mla.py.

The cache holds the latent and the shared rotary key, not keys and values: kv_rank + rope_dim numbers a token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tercet.model.attention import Documents, attend, attend_masked
from tercet.model.cache import Cache
from tercet.model.linear import Linear, weight_of
from tercet.model.norm import RMSNorm
from tercet.model.rope import Table, latent_softmax_factor, rotate, rotate_interleaved
from tercet.spec.blocks.mla import MLA
from tercet.spec.model import Model


class LatentAttention(nn.Module):
    """x (batch, tokens, width) -> the same shape."""

    def __init__(self, spec: MLA, model: Model):
        super().__init__()
        self.spec = spec
        self.attend = attend  # a seam, as in gqa.py
        width, heads = model.width, spec.heads
        self.scale = spec.query_dim**-0.5 * latent_softmax_factor(model.rope)
        if spec.q_rank is None:
            self.q_proj = Linear(width, heads * spec.query_dim, bias=False)
        else:
            self.q_a_proj = Linear(width, spec.q_rank, bias=spec.bias)
            self.q_a_layernorm = RMSNorm(spec.q_rank, spec.latent_eps)
            self.q_b_proj = Linear(spec.q_rank, heads * spec.query_dim, bias=False)
        self.kv_a_proj_with_mqa = Linear(width, spec.kv_rank + spec.rope_dim, bias=spec.bias)
        self.kv_a_layernorm = RMSNorm(spec.kv_rank, spec.latent_eps)
        self.kv_b_proj = Linear(spec.kv_rank, heads * (spec.nope_dim + spec.value_dim), bias=False)
        self.o_proj = Linear(heads * spec.value_dim, width, bias=spec.bias)

    def forward(
        self, x: Tensor, table: Table, documents: Documents | None = None, cache: Cache | None = None
    ) -> Tensor:
        s = self.spec
        by_head = (*x.shape[:2], s.heads, -1)
        q = self.q_proj(x) if s.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q_nope, q_rope = q.view(by_head).split((s.nope_dim, s.rope_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((s.kv_rank, s.rope_dim), dim=-1)
        latent = self.kv_a_layernorm(latent)
        k_rope = self._turn(k_rope.unsqueeze(2), table)  # one head, shared by all
        mask = None
        if cache is not None:
            latent, k_rope = cache.add("latent", latent), cache.add("k_rope", k_rope)
            mask = cache.mask(None)
            if x.shape[1] == 1:
                return self._absorbed(q_nope, self._turn(q_rope, table), latent, k_rope, mask)
        k_nope, v = self.kv_b_proj(latent).view(*latent.shape[:2], s.heads, -1).split((s.nope_dim, s.value_dim), dim=-1)
        q = torch.cat((q_nope, self._turn(q_rope, table)), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, s.heads, -1)), dim=-1)
        if mask is not None:
            return self.o_proj(attend_masked(q, k, v, mask, self.scale).flatten(2))
        return self.o_proj(self.attend(q, k, v, documents, self.scale).flatten(2))

    def _absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, mask: Tensor | None) -> Tensor:
        """Attend in the latent itself, as one key-value head that all query heads share.

        The same numbers by another order of products: the keys' up-projection is moved to the query, the values' to
        the result (section 2.1.2: "absorbed"). For one new token this spares expanding all that is kept.
        """
        s = self.spec
        up = weight_of(self.kv_b_proj).view(s.heads, s.nope_dim + s.value_dim, s.kv_rank)
        up_keys, up_values = up.split((s.nope_dim, s.value_dim), dim=1)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, up_keys), q_rope), dim=-1)
        k = torch.cat((latent.unsqueeze(2), k_rope), dim=-1)
        found = attend_masked(q, k, latent.unsqueeze(2), mask, self.scale)
        return self.o_proj(torch.einsum("bthr,hvr->bthv", found, up_values).flatten(2))

    def _turn(self, x: Tensor, table: Table) -> Tensor:
        """Rotate in the table's type, which is fp32 where the family's own code wants it."""
        turned = (rotate_interleaved if self.spec.interleaved else rotate)(x.to(table[0].dtype), table)
        return turned.to(x.dtype)
