"""Attention as a card runs it: which kernel PyTorch would choose, and stand-ins that keep what that kernel keeps.

Choice by torch/backends/cuda and aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (2.13): flash wants fp16 or bf16
and no mask; memory-efficient wants equal numbers of heads; what is left builds the whole matrix of scores.
Backward by the formulas of FlashAttention (Dao et al. 2022, arXiv 2205.14135, algorithm 4), document by document.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
WIDEST = 256  # head size that the fused kernels take


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> str:
    """Return flash, efficient or math for (B, H, T, D) tensors."""
    fits = q.shape[-1] == k.shape[-1] == v.shape[-1] <= WIDEST and q.shape[-1] % 8 == 0
    if q.dtype in (torch.float16, torch.bfloat16) and mask is None and fits:
        return "flash"
    if not grouped and q.dtype in (torch.float16, torch.bfloat16, torch.float32) and q.shape[-1] % 4 == 0:
        return "efficient"
    return "math"


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    grouped = query.shape[-3] != key.shape[-3]
    kernel = choose(query, key, value, attn_mask, grouped)
    if kernel == "flash":
        flash = aten._scaled_dot_product_flash_attention.default
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if kernel == "efficient":
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        keeps = query.requires_grad or key.requires_grad or value.requires_grad
        efficient = aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, attn_mask, keeps, dropout_p, is_causal, scale=scale)[0]
    plain = aten._scaled_dot_product_attention_math.default
    return plain(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


# ------------------------------------------------------------------------------------- arithmetic of one document


def _visible(queries: int, keys: int, causal: bool, window: tuple[int, int]) -> Tensor | None:
    """Return which of (queries, keys) may be seen, the last query at the last key; None: all."""
    if not causal and window == (-1, -1):
        return None
    at = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal or window[1] >= 0:
        seen &= key <= at + (0 if causal else window[1])
    if window[0] >= 0:
        seen &= key >= at - window[0]
    return seen


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None, bias: Tensor | None = None) -> Any:
    """Return (out, logsumexp in fp32) of (…, H, T, D); k and v may have fewer heads."""
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (k, v))
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    total = scores.logsumexp(-1)
    out = (scores - total[..., None]).exp() @ v.to(wide)
    return out.to(q.dtype), total


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, scale: float, seen: Tensor | None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    kinds, groups = (q.dtype, k.dtype, v.dtype), q.shape[-3] // k.shape[-3]
    grad, q, k, v, out = (x.to(wide) for x in (grad, q, k, v, out))
    k, v = (x.repeat_interleave(groups, -3) if groups > 1 else x for x in (k, v))
    scores = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    p = (scores - total[..., None]).exp()
    d = p * (grad @ v.transpose(-2, -1) - (grad * out).sum(-1, keepdim=True)) * scale
    grads = [d @ k, d.transpose(-2, -1) @ q, p.transpose(-2, -1) @ grad]
    if groups > 1:
        grads[1:] = [x.unflatten(-3, (-1, groups)).sum(-3) for x in grads[1:]]
    return grads[0].to(kinds[0]), grads[1].to(kinds[1]), grads[2].to(kinds[2])


# -------------------------------------------------------------------------------------------------- stand-ins


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    numbers = torch.zeros(2, dtype=torch.int64)
    edges, empty = torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    if q.is_meta:
        out, total = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    else:
        out, total = forward(q, k, v, _scale(scale, q), _visible(q.shape[2], k.shape[2], causal, (-1, -1)))
    return out, total, edges, edges, q.shape[2], k.shape[2], numbers, empty, q.new_empty(0)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, edges_q: Any, edges_k: Any,
                   longest_q: int, longest_k: int, dropout: float, causal: bool, *rest: Any, scale: Any = None) -> Any:  # fmt: skip
    if q.is_meta:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    seen = _visible(q.shape[2], k.shape[2], causal, (-1, -1))
    return backward(grad, q, k, v, out, total, _scale(scale, q), seen)


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keeps: bool, dropout: float = 0.0,
              causal: bool = False, *, scale: Any = None) -> Any:  # fmt: skip
    seed = torch.zeros((), dtype=torch.int64)
    if q.is_meta:
        return torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device="meta"), seed, seed
    out, total = forward(q, k, v, _scale(scale, q), _visible(q.shape[2], k.shape[2], causal, (-1, -1)), bias)
    return out, total, seed, seed.clone()


def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, total: Tensor,
                       seed: Any, offset: Any, dropout: float, wanted: Any, causal: bool = False, *, scale: Any = None) -> Any:  # fmt: skip
    if q.is_meta:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None
    seen = _visible(q.shape[2], k.shape[2], causal, (-1, -1))
    return *backward(grad, q, k, v, out, total, _scale(scale, q), seen, bias), None


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def varlen(q: Tensor, k: Tensor, v: Tensor, edges: Tensor, edges_k: Tensor, longest: int, longest_k: int,
           causal: bool = False, scale: float | None = None, window: Any = None, enable_gqa: bool = False, *rest: Any) -> Any:  # fmt: skip
    """torch_attn::_varlen_attn over (N, H, D): its checks, (out, logsumexp (H, N), random state)."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if edges.dtype != torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    if q.shape[-1] % 8 or q.shape[-1] > WIDEST:
        raise RuntimeError("FlashAttention wants a head size that is a multiple of 8 and at most 256")
    state = torch.zeros(2, dtype=torch.uint64)
    if q.is_meta:
        return torch.empty_like(q), torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device="meta"), state
    out, total = torch.zeros_like(q), torch.zeros(q.shape[1], q.shape[0])
    for part, seen in _documents(edges, causal, window):
        o, t = forward(*(x[part].transpose(0, 1) for x in (q, k, v)), _scale(scale, q), seen)  # pyright: ignore[reportCallIssue]
        out[part], total[:, part] = o.transpose(0, 1), t
    return out, total, state


def varlen_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, edges: Tensor,
                    edges_k: Tensor, longest: int, longest_k: int, causal: bool, state: Any,
                    scale: float | None = None, window: Any = None) -> Any:  # fmt: skip
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.is_meta:
        return grads
    for part, seen in _documents(edges, causal, window):
        pieces = (x[part].transpose(0, 1) for x in (grad, q, k, v, out))
        found = backward(*pieces, total[:, part], _scale(scale, q), seen)  # pyright: ignore[reportCallIssue]
        for kept, x in zip(grads, found, strict=True):
            kept[part] = x.transpose(0, 1)
    return grads


def _documents(edges: Tensor, causal: bool, window: Any) -> Any:
    left, right = window or (-1, -1)
    for begin, end in pairwise(edges.tolist()):
        if end > begin:
            yield slice(begin, end), _visible(end - begin, end - begin, causal, (left, right))


def operations(q: Tensor, k: Tensor, v: Tensor, causal: bool, edges: Tensor | None = None) -> float:
    """Return the FLOPs of two products: queries by keys and scores by values; the causal half only."""
    heads = q.shape[-3] if edges is None else q.shape[1]
    if edges is not None and not edges.is_meta:
        pairs: float = sum((b - a) ** 2 for a, b in pairwise(edges.tolist()))
    elif edges is not None:
        pairs = q.shape[0] ** 2
    else:
        pairs = q.shape[0] * q.shape[2] * k.shape[2]
    return 2 * heads * pairs * (q.shape[-1] + v.shape[-1]) * (0.5 if causal else 1.0)
