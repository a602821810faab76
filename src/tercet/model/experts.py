"""Running many small experts: sort the tokens by expert, one matmul per expert, put the results back.

Shape letters: N tokens, K experts per token, E experts, W width, F inner width. No token is ever dropped.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.model.swiglu import gated
from tercet.spec.blocks.moe import MoE


class _Dispatch(torch.autograd.Function):
    """Rows of x in the order of their experts: (N, W) -> (N * K, W). Backward adds a token's K rows by a sum
    over an axis, not by scattered additions: faster, and the same bits every time."""

    @staticmethod
    def forward(ctx, x_NW: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x_NW.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (inverse,) = ctx.saved_tensors
        grad_x = grad.index_select(0, inverse).view(-1, ctx.k, grad.shape[-1]).sum(1)
        return grad_x, None, None, None


class _Combine(torch.autograd.Function):
    """Weighted sum of each token's K expert rows: (N * K, W), (N, K) -> (N, W). The weights stay as wide as the
    gate made them; products are summed in that type."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights_NK: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights_NK, order, inverse)
        rows_NKW = rows.index_select(0, inverse).view(*weights_NK.shape, -1)
        return (rows_NKW * weights_NK.unsqueeze(-1)).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weights_NK, order, inverse = ctx.saved_tensors
        per_row = grad.index_select(0, order // weights_NK.shape[1])
        grad_rows = (per_row * weights_NK.flatten().index_select(0, order).unsqueeze(-1)).to(rows.dtype)
        products = (per_row * rows).sum(-1, dtype=weights_NK.dtype)
        grad_weights = products.index_select(0, inverse).view_as(weights_NK)
        return grad_rows, grad_weights, None, None


class _LoopedLinear(torch.autograd.Function):
    """rows @ weight[e]ᵀ for each expert's run of rows. For one gradient of the stacked weight, not E of them."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows, weight_EOI)
        ctx.counts = counts
        out = rows.new_empty(rows.shape[0], weight_EOI.shape[1])
        begin = 0
        for e, count in enumerate(counts):
            part = slice(begin, begin + count)
            torch.mm(rows[part], weight_EOI[e].t(), out=out[part])
            begin += count
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weight_EOI = ctx.saved_tensors
        grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight_EOI)
        begin = 0
        for e, count in enumerate(ctx.counts):
            part = slice(begin, begin + count)
            torch.mm(grad[part], weight_EOI[e], out=grad_rows[part])
            torch.mm(grad[part].t(), rows[part], out=grad_weight[e])  # an idle expert's is zero
            begin += count
        return grad_rows, grad_weight, None


def expert_linear(rows: Tensor, weight_EOI: Tensor, counts: Tensor) -> Tensor:
    """Return each row times its expert's matrix; rows are sorted by expert, counts (E,) says how many each has.

    On a GPU in bf16 one grouped matmul; elsewhere a loop, which on the CPU is as fast (grouped_mm loops there too)
    and also runs in float64.
    """
    aligned = rows.shape[1] % 8 == 0 and weight_EOI.shape[1] % 8 == 0  # grouped_mm wants 16-byte rows
    if rows.is_cuda and rows.dtype == torch.bfloat16 and aligned:
        offsets = counts.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(rows, weight_EOI.transpose(-2, -1), offs=offsets)
    return _LoopedLinear.apply(rows, weight_EOI.to(rows.dtype), counts.tolist())


class Experts(nn.Module):
    """Stacked SwiGLU experts under transformers 5's names."""

    def __init__(self, spec: MoE, width: int):
        super().__init__()
        self.experts = spec.experts
        self.gate_up_proj = nn.Parameter(torch.empty(spec.experts, 2 * spec.ffn, width))
        self.down_proj = nn.Parameter(torch.empty(spec.experts, width, spec.ffn))

    def forward(self, x_NW: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """Return (N, W): for each token the weighted sum of its experts' outputs."""
        flat = chosen_NK.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.bincount(flat, minlength=self.experts)
        rows = _Dispatch.apply(x_NW, order, inverse, chosen_NK.shape[1])
        rows = self.run(rows, counts)
        return _Combine.apply(rows, weights_NK, order, inverse)

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return every row's expert output; rows (R, W) are sorted by expert, counts (experts held,) long."""
        gate, up = expert_linear(rows, self.gate_up_proj, counts).chunk(2, dim=-1)
        return expert_linear(gated(gate, up), self.down_proj, counts)
