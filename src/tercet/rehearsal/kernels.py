"""Stand-ins for kernels that only a card has, or that need a number which shapes do not give.

Each takes what stands behind the tensors (CPU tensors, or meta tensors without values), checks what the real kernel
checks, and holds for backward what the real one holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.varlen
from torch import Tensor

from tercet.rehearsal import attention

aten = torch.ops.aten


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Without values: balanced choices, k different ones a row, each as often as any other."""
    if not x.is_meta:
        return aten.topk.default(x, k, dim, largest, sorted)
    values, _ = aten.topk.default(x, k, dim, largest, sorted)
    shape, size = list(values.shape), x.shape[dim]
    rows = values.numel() // max(k, 1)
    chosen = (torch.arange(rows)[:, None] * k + torch.arange(k)) % size
    moved = [*[s for n, s in enumerate(shape) if n != dim % x.dim()], k]
    return values, chosen.reshape(moved).movedim(-1, dim)


def _sort(x: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    if not x.is_meta:
        return aten.sort.default(x, dim, descending)
    order = torch.arange(x.shape[dim])
    return torch.empty_like(x), order.reshape([-1 if n == dim % x.dim() else 1 for n in range(x.dim())]).expand(x.shape)


def _argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    return (
        torch.zeros(aten.argmax.default(x, dim, keepdim).shape, dtype=torch.long)
        if x.is_meta
        else aten.argmax.default(x, dim, keepdim)
    )


def _index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Masks are turned into positions first: their number is then known without the values of `x`."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        elif index.is_meta:  # no value: everything is taken
            found += torch.ones(index.shape, dtype=torch.bool).nonzero().unbind(1)
        else:
            found += index.nonzero().unbind(1)
    if x.is_meta:
        found = [i if i is None else i.to("meta") for i in found]
    return aten.index.Tensor(x, found)


_varlen = torch.ops.torch_attn._varlen_attn.default
_varlen_backward = torch.ops.torch_attn._varlen_attn_backward.default

STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention.default: attention.flash,
    aten._scaled_dot_product_flash_attention_backward.default: attention.flash_backward,
    aten._scaled_dot_product_efficient_attention.default: attention.efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: attention.efficient_backward,
    _varlen: attention.varlen,
    _varlen_backward: attention.varlen_backward,
    aten.topk.default: _topk,
    aten.sort.default: _sort,
    aten.argmax.default: _argmax,
    aten.index.Tensor: _index,
}


# FLOPs of what PyTorch's counter does not know, or counts without the causal half. Backward: five products for two.
OPERATIONS: dict[Any, Callable[..., float]] = {
    aten._scaled_dot_product_flash_attention.default: lambda q, k, v, d=0.0, causal=False, *r, **n: (
        attention.operations(q, k, v, causal)
    ),
    aten._scaled_dot_product_efficient_attention.default: lambda q, k, v, *r, **n: attention.operations(q, k, v, True),
    aten._scaled_dot_product_flash_attention_backward.default: lambda g, q, k, v, *r, **n: (
        2.5 * attention.operations(q, k, v, True)
    ),
    aten._scaled_dot_product_efficient_attention_backward.default: lambda g, q, k, v, *r, **n: (
        2.5 * attention.operations(q, k, v, True)
    ),
    _varlen: lambda q, k, v, edges, *r, **n: attention.operations(q, k, v, True, edges),
    _varlen_backward: lambda g, q, k, v, o, t, edges, *r, **n: 2.5 * attention.operations(q, k, v, True, edges),
    aten._grouped_mm.default: lambda a, b, *r, **n: 2.0 * a.numel() * b.shape[-1],
}
