"""Running many small experts: sort the tokens by expert, run each expert, put the results back.

Shape letters: N tokens, K experts per token, E experts, W width, F inner width. No token is ever dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

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


class _ExpertLoop(torch.autograd.Function):
    """All of it, one expert after the other: gather its tokens, gate_up, silu(gate) * up * weight, down, add.

    A few hundred rows stay in the cache through the whole chain, and only gate_up's output is kept: the gathered
    rows and the product are made again in backward. Sums over a token's experts are fp32 (fp64 for fp64 models).
    """

    @staticmethod
    def forward(ctx, x_NW: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, token: Tensor, counts: list[int]):
        """weights and token: (N * K,) sorted by expert, with the token that each choice belongs to."""
        wide = torch.promote_types(x_NW.dtype, torch.float32)
        total = torch.zeros(x_NW.shape, dtype=wide, device=x_NW.device)
        hidden = x_NW.new_empty(len(token), gate_up.shape[1])
        for e, part in _runs(counts):
            index = token[part]
            torch.mm(x_NW.index_select(0, index), gate_up[e].t(), out=hidden[part])
            gate, up = hidden[part].chunk(2, dim=-1)
            product = (F.silu(gate) * up).mul_(weights[part, None])
            total.index_add_(0, index, (product @ down[e].t()).to(wide))
        ctx.save_for_backward(x_NW, gate_up, down, weights, token, hidden)
        ctx.counts = counts
        return total.to(x_NW.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x_NW, gate_up, down, weights, token, hidden = ctx.saved_tensors
        wide = torch.promote_types(x_NW.dtype, torch.float32)
        grad_x = torch.zeros(x_NW.shape, dtype=wide, device=x_NW.device)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)  # an idle expert's stay zero
        grad_weights = torch.empty_like(weights)
        for e, part in _runs(ctx.counts):
            index, weight = token[part], weights[part, None]
            rows, out = x_NW.index_select(0, index), grad.index_select(0, index)
            gate, up = hidden[part].chunk(2, dim=-1)
            active = F.silu(gate)
            product = active * up
            back = out @ down[e]
            grad_weights[part] = (back * product).sum(-1, dtype=weights.dtype)
            # Transposed and laid out anew: bf16 matmuls on a CPU are a quarter faster on it.
            torch.mm(out.t().contiguous(), product.mul_(weight), out=grad_down[e])
            back.mul_(weight)
            inner = torch.cat((torch.ops.aten.silu_backward(back * up, gate), back.mul_(active)), dim=-1)
            torch.mm(inner.t().contiguous(), rows, out=grad_gate_up[e])
            grad_x.index_add_(0, index, (inner @ gate_up[e]).to(wide))
        return grad_x.to(x_NW.dtype), grad_gate_up, grad_down, grad_weights, None, None


def _padded(token: Tensor, weights: Tensor, expert: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sorted choices with every expert's run filled up to a multiple of 16 (64 for long runs).

    Filled places hold token 0 with weight 0, so they add nothing anywhere. A CPU's bf16 matmul is compiled for each
    shape it meets and a thousand are remembered: with runs of every length each matmul would be compiled anew,
    which takes ten times as long as running it.
    """
    step = 16 if len(token) < 512 * len(counts) else 64
    longer = (counts + step - 1) // step * step
    shift = (longer.cumsum(0) - longer) - (counts.cumsum(0) - counts)
    place = torch.arange(len(token), device=token.device) + shift.index_select(0, expert)
    total = int(longer.sum())
    token = token.new_zeros(total).index_copy(0, place, token)
    weights = weights.new_zeros(total).index_copy(0, place, weights)
    return token, weights, longer


def _runs(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its run of sorted rows) of every expert that has any."""
    begin = 0
    for e, count in enumerate(counts):
        if count:
            yield e, slice(begin, begin + count)
        begin += count


def has_grouped_matmul(rows: Tensor, weight_EOI: Tensor) -> bool:
    """Return whether F.grouped_mm is the fast way: on a card, in bf16, with rows of 16 bytes."""
    aligned = rows.shape[1] % 8 == 0 and weight_EOI.shape[1] % 8 == 0 and weight_EOI.shape[2] % 8 == 0
    return not rows.is_cpu and rows.dtype == torch.bfloat16 and aligned


def expert_linear(rows: Tensor, weight_EOI: Tensor, counts: Tensor) -> Tensor:
    """Return each row times its expert's matrix; rows are sorted by expert, counts (E,) says how many each has."""
    if has_grouped_matmul(rows, weight_EOI):
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
        if not has_grouped_matmul(x_NW, self.down_proj):
            token, weights = order // chosen_NK.shape[1], weights_NK.flatten().index_select(0, order)
            counts = torch.bincount(flat, minlength=self.experts)
            if x_NW.dtype in (torch.bfloat16, torch.float16):
                token, weights, counts = _padded(token, weights, flat.index_select(0, order), counts)
            gate_up, down = self.gate_up_proj.to(x_NW.dtype), self.down_proj.to(x_NW.dtype)
            return _ExpertLoop.apply(x_NW, gate_up, down, weights, token, counts.tolist())
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.bincount(flat, minlength=self.experts)
        rows = _Dispatch.apply(x_NW, order, inverse, chosen_NK.shape[1])
        rows = self.run(rows, counts)
        return _Combine.apply(rows, weights_NK, order, inverse)

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return every row's expert output; rows (R, W) are sorted by expert, counts (experts held,) long."""
        gate, up = expert_linear(rows, self.gate_up_proj, counts).chunk(2, dim=-1)
        return expert_linear(gated(gate, up), self.down_proj, counts)
