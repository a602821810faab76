"""Inner attention: softmax(q kᵀ · scale) v, causal, and only within a document.

Shape letters: B rows, T tokens, H query heads, K key-value heads, D head size, N all B*T tokens in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from inspect import signature
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.spec.kernels import VARLEN, attention_kernel

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Stacks:
    """Documents of about one length stacked into a batch each, the shorter ones filled up at their end.

    In causal attention no token sees what comes after it, so the filling needs no mask. It repeats the document's
    last token, whose softmax is finite.
    """

    shapes: list[tuple[int, int]]  # (documents, padded length) of each stack
    source: Tensor  # which of the N tokens lies at each place of the stacks
    place: Tensor  # where in the stacks each of the N tokens lies

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Stacks:
        stacks: dict[int, list[tuple[int, int]]] = {}
        begin = 0
        for length in lengths:
            stacks.setdefault(padded_length(length), []).append((begin, length))
            begin += length
        source = torch.empty(sum(padded * len(found) for padded, found in stacks.items()), dtype=torch.long)
        place = torch.empty(begin, dtype=torch.long)
        at = 0
        for padded, found in stacks.items():
            for first, length in found:
                source[at : at + padded] = torch.arange(first, first + padded).clamp_(max=first + length - 1)
                place[first : first + length] = torch.arange(at, at + length)
                at += padded
        return cls([(len(found), padded) for padded, found in stacks.items()], source.to(device), place.to(device))

    def take(self, x: Tensor) -> list[Tensor]:
        """(N, heads, …) -> for each stack (documents, heads, padded length, …)."""
        return self._cut(x.index_select(0, self.source))

    def take_unfilled(self, x: Tensor) -> list[Tensor]:
        """As `take`, with zeros for the filling."""
        return self._cut(x.new_zeros(len(self.source), *x.shape[1:]).index_copy_(0, self.place, x))

    def _cut(self, x: Tensor) -> list[Tensor]:
        pieces = x.split([documents * length for documents, length in self.shapes])
        return [p.unflatten(0, shape).transpose(1, 2) for p, shape in zip(pieces, self.shapes, strict=True)]

    def put(self, pieces: list[Tensor]) -> Tensor:
        """The reverse of `take`; what lies at the filling is dropped."""
        return torch.cat([p.transpose(1, 2).flatten(0, 1) for p in pieces]).index_select(0, self.place)


def padded_length(tokens: int) -> int:
    """Round up to one of four lengths per doubling, at least 16: few shapes whatever the text.

    On a CPU every shape of a bf16 matmul is compiled, and kept: a shape per document costs time and grows memory.
    """
    step = max(16, 1 << (tokens - 1).bit_length() - 3) if tokens > 8 else 16
    return -(-tokens // step) * step


@dataclass(frozen=True)
class Documents:
    """Where documents begin and end in B*T flattened tokens; attention never crosses a border."""

    boundaries: Tensor  # int32 (documents + 1,), on the device of the computation
    lengths: list[int]

    @classmethod
    def of(cls, boundaries: Tensor, device: torch.device) -> Documents:
        """Read the borders once per batch, not once per layer: on a GPU each read waits for it."""
        lengths = [b - a for a, b in pairwise(boundaries.tolist()) if b > a]
        return cls(boundaries.to(device, torch.int32), lengths)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def stacks(self) -> Stacks:
        return Stacks.of(self.lengths, self.boundaries.device)


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
    widest = max(size, q_BTHD.shape[-1])
    kernel = None
    if documents is not None:
        kernel, widest = attention_kernel(not q_BTHD.is_cpu, q_BTHD.dtype in HALF, widest)
    if widest != size or widest != q_BTHD.shape[-1]:  # the fast kernels want one size, and zeros change nothing
        q_BTHD, k_BTKD, v_BTKD = (_widen(x, widest) for x in (q_BTHD, k_BTKD, v_BTKD))
    if documents is None:
        return _causal(q_BTHD, k_BTKD, v_BTKD, scale, window)[..., :size]
    batch, tokens = q_BTHD.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q_BTHD, k_BTKD, v_BTKD))
    if kernel == VARLEN:
        out = _packed(q, k, v, documents, scale, window)
    else:
        out = _stacked(q, k, v, documents.stacks, scale, window)
    return out.view(batch, tokens, *out.shape[1:])[..., :size]


def attend_masked(q_BTHD: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return (B, T, H, D of v) for what `mask` (B, 1, T, L) lets each new token see; without one it sees all."""
    q, k, v = (x.transpose(1, 2) for x in (q_BTHD, k_BLKD, v_BLKD))
    k, v, grouped = _for_kernel(q, k, v, masked=mask is not None)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped).transpose(1, 2)


def _packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float, window: int | None) -> Tensor:
    """Flash attention over (N, heads, D), all documents in one call."""
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {}
    if (groups := q.shape[1] // k.shape[1]) > 1:
        if _varlen_takes_groups():
            grouped = {"enable_gqa": True}
        else:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    edges, longest = documents.boundaries, documents.longest
    left = -1 if window is None else window - 1
    window_size = (left, 0)
    out = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scale, window_size=window_size, **grouped)
    return cast(Tensor, out)  # a pair only where the sums are asked for


@cache
def _varlen_takes_groups() -> bool:
    """Return whether this release's varlen_attn takes fewer heads of keys; older ones want equal numbers."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def _widen(x: Tensor, size: int) -> Tensor:
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _stacked(q: Tensor, k: Tensor, v: Tensor, stacks: Stacks, scale: float, window: int | None) -> Tensor:
    """Attention over (N, heads, D), one call per stack of documents."""
    if q.is_cpu and (window is None or all(length <= window for _, length in stacks.shapes)):
        return _CpuAttention.apply(q, k, v, stacks, scale)
    pieces = zip(stacks.take(q), stacks.take(k), stacks.take(v), strict=True)
    return stacks.put([_causal(*(x.transpose(1, 2) for x in qkv), scale, window).transpose(1, 2) for qkv in pieces])  # pyright: ignore[reportCallIssue]


class _CpuAttention(torch.autograd.Function):
    """Causal attention of documents on a CPU.

    Keeps for backward the N tokens alone, so what is held has the same sizes at every step: sizes that vary with
    the text leave holes in the heap. Backward runs in fp32 where the weights are bf16: PyTorch's bf16 kernel takes
    twice as long for it.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, stacks: Stacks, scale: float) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        out, normaliser = [], []
        for a, b, c in zip(stacks.take(q), stacks.take(k), stacks.take(v), strict=True):
            b, c = (x.repeat_interleave(groups, 1) for x in (b, c)) if groups > 1 else (b, c)
            o, n = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(a, b, c, 0.0, True, scale=scale)
            out.append(o)
            normaliser.append(n)
        out, normaliser = stacks.put(out), stacks.put(normaliser)
        ctx.save_for_backward(q, k, v, out, normaliser)
        ctx.stacks, ctx.scale, ctx.groups = stacks, scale, groups
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        stacks, groups = ctx.stacks, ctx.groups
        wide = torch.promote_types(grad.dtype, torch.float32)
        pieces = [stacks.take_unfilled(grad), *(stacks.take(x) for x in ctx.saved_tensors)]
        found: tuple[list[Tensor], ...] = ([], [], [])
        for *inputs, normaliser in zip(*pieces, strict=True):
            g, a, b, c, o = (x.to(wide) for x in inputs)
            b, c = (x.repeat_interleave(groups, 1) for x in (b, c)) if groups > 1 else (b, c)
            grads = list(
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    g, a, b, c, o, normaliser, 0.0, True, scale=ctx.scale
                )
            )
            if groups > 1:
                grads[1:] = (x.unflatten(1, (-1, groups)).sum(2) for x in grads[1:])
            for kept, x in zip(found, grads, strict=True):
                kept.append(x.to(grad.dtype))
        return *(stacks.put(kept) for kept in found), None, None


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention over the tokens axis; with fewer queries than keys, the queries are the last ones."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    queries, keys = q.shape[2], k.shape[2]
    if queries in (keys, 1) and (window is None or keys <= window):  # the last one sees all
        k, v, grouped = _for_kernel(q, k, v, masked=False)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
    else:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
        if window is not None:
            mask = mask.triu(keys - queries - window + 1)
        k, v, grouped = _for_kernel(q, k, v, masked=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _for_kernel(q: Tensor, k: Tensor, v: Tensor, masked: bool) -> tuple[Tensor, Tensor, bool]:
    """Return (k, v, whether they are grouped), heads on axis 1, so that no kernel builds queries times keys.

    On a card only flash attention takes grouped heads: half precision, no mask. The next best one wants equal numbers
    of heads, and without them PyTorch falls to the kernel that holds all scores.
    """
    groups = q.shape[1] // k.shape[1]
    if groups == 1 or q.is_cpu or (q.dtype in HALF and not masked):
        return k, v, groups > 1
    return k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
