"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): x / sqrt(mean(x²) + eps) * weight.

Computed in fp32 whatever the type: published models were trained so, and a float64 model that is to equal them
has to round where they do.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x normalised, what each row was multiplied with)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if x.dtype == torch.float64:
        return (wide * scale).double() * weight, scale
    return (wide * scale * weight).to(x.dtype), scale


class _RMSNorm(torch.autograd.Function):
    """Keeps only x and one number a row for backward; plain autograd keeps three fp32 copies of x."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, scale.dtype)
        normed = x.to(wide) * scale
        grad = grad.to(wide)
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        # d/dx of x * s(x): s * (g - n * mean(g * n)), with g the weighted gradient and n the normalised row.
        mean = (product @ weight.to(wide)).unsqueeze(-1) / x.shape[-1]
        grad_x = torch.mul(grad, weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight, None


class RMSNorm(nn.Module):
    """x of shape (..., width) -> the same shape and type."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _RMSNorm.apply(x, self.weight, self.eps)
        return normalise(x, self.weight, self.eps)[0]
