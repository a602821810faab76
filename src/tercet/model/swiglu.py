"""SwiGLU feed-forward. Twin of spec/blocks/swiglu.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.model.linear import Joined, Linear, join
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
    return _Gate.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate) * up


class FeedForward(nn.Module):
    """x (..., width) -> the same shape."""

    def __init__(self, spec: SwiGLU, width: int):
        super().__init__()
        self.gate_proj = Linear(width, spec.ffn, bias=spec.bias)
        self.up_proj = Linear(width, spec.ffn, bias=spec.bias)
        self.down_proj = Linear(spec.ffn, width, bias=spec.bias)
        self.joined: Joined | None = None  # gate and up, where `join` was called

    def join(self) -> None:
        """Compute gate and up as one product from now on. The module must not move any more."""
        self.joined = join((self.gate_proj, self.up_proj))

    def forward(self, x: Tensor) -> Tensor:
        if self.joined is not None:
            return self.down_proj(gated(*self.joined(x)))
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
