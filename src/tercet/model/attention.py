"""Inner attention: softmax(q kᵀ · scale) v, causal, and only within a document.

Shape letters: B rows, T tokens, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in B*T flattened tokens; attention never crosses a border."""

    boundaries: Tensor  # int32 (documents + 1,), on the device of the computation
    spans: tuple[tuple[int, int], ...]
    longest: int

    @classmethod
    def of(cls, boundaries: Tensor, device: torch.device) -> Documents:
        """Read the borders once per batch, not once per layer: on a GPU each read waits for it."""
        edges = boundaries.tolist()
        spans = tuple((a, b) for a, b in pairwise(edges) if b > a)
        return cls(boundaries.to(device, torch.int32), spans, max(b - a for a, b in spans))


def attend(
    q_BTHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    documents: Documents | None,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Return (B, T, H, D of v). Without `documents` each row is one document.

    With `window` a token sees only the last `window` tokens of its document, itself included.
    """
    size = v_BTKD.shape[-1]
    if size != q_BTHD.shape[-1]:  # latent attention: the fast kernels want one size, and zeros change nothing
        widest = max(size, q_BTHD.shape[-1])
        q_BTHD, k_BTKD, v_BTKD = (_widen(x, widest) for x in (q_BTHD, k_BTKD, v_BTKD))
    if documents is None:
        return _causal(q_BTHD, k_BTKD, v_BTKD, scale, window)[..., :size]
    batch, tokens = q_BTHD.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTKD, v_BTKD))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # older releases of varlen_attn want equal numbers of heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        edges, longest = documents.boundaries, documents.longest
        left = -1 if window is None else window - 1
        out = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scale, window_size=(left, 0))
    else:
        # One call per document: on the CPU five times as fast as one call with a block mask. Split, not sliced:
        # a slice's backward writes a whole tensor of zeros, once per document.
        lengths = [end - begin for begin, end in documents.spans]
        pieces = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        out = torch.cat([_causal(a[None], b[None], c[None], scale, window)[0] for a, b, c in pieces])
    return out.view(batch, tokens, *out.shape[1:])[..., :size]


def _widen(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention over the tokens axis; with fewer queries than keys, the queries are the last ones."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    if queries == keys and (window is None or keys <= window):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if window is not None:
            mask = mask.triu(keys - queries - window + 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)
