"""SwiGLU feed-forward. Twin of spec/blocks/swiglu.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.model.linear import Linear
from tercet.spec.blocks.swiglu import SwiGLU


class _Gate(torch.autograd.Function):
    """silu(gate) * up, keeping the two inputs only: silu is recomputed in backward, which costs no matmul."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, grad * F.silu(gate)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return _Gate.apply(gate, up)


class FeedForward(nn.Module):
    """x (..., width) -> the same shape."""

    def __init__(self, spec: SwiGLU, width: int):
        super().__init__()
        self.gate_proj = Linear(width, spec.ffn, bias=spec.bias)
        self.up_proj = Linear(width, spec.ffn, bias=spec.bias)
        self.down_proj = Linear(spec.ffn, width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
