"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split pairs as Llama's checkpoints have them."""

from __future__ import annotations

import torch
from torch import Tensor

from tercet.spec.model import Rope


def rotary_table(rope: Rope, dim: int, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of shape (batch, tokens, 1, dim) for integer positions of shape (batch, tokens).

    Angles are computed in fp32 at least, whatever `dtype`: a bf16 angle is wrong from position 256 on.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    exponent = torch.arange(0, dim, 2, device=positions.device, dtype=wide) / dim
    frequencies = 1.0 / rope.theta**exponent
    angles = positions[..., None].to(wide) * frequencies
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x of shape (batch, tokens, heads, dim) by the table; pair i is (x[i], x[i + dim/2])."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
