"""Linear and embedding layers without an initialisation of their own.

Values come from one place (decoder.initial_tensor) or from files. PyTorch's own would cost seconds: on the meta device
the embedding's loads a symbolic algebra system first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS, NARROW = 8, 1024


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return multiply(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., in) -> (..., out), as `F.linear`; a few rows of fp32 on a CPU the other way round.

    Generating multiplies a whole matrix with one row a text, so reading the matrix is what takes the time. For that
    `F.linear` takes kernels that read at half the memory's speed (one row) or a quarter of it (two or three);
    weight times columns reads at full speed while the rows are few (bench/decode_speed.md).
    """
    if torch.is_grad_enabled() or not x.is_cpu or x.dtype != torch.float32 or type(weight) is not nn.Parameter:
        return F.linear(x, weight, bias)
    width = x.shape[-1]
    rows = x.numel() // width
    if not ((0 < rows <= FEW_ROWS and width < NARROW) or 2 <= rows <= 3):
        return F.linear(x, weight, bias)
    columns = x.reshape(rows, width)
    if rows == 1:
        columns = torch.cat((columns, columns))  # one column would take the slow kernel again
    out = torch.mm(weight, columns.t()).t()[:rows].reshape(*x.shape[:-1], -1)
    return out if bias is None else out + bias


@dataclass(frozen=True)
class Joined:
    """Matrices that multiply the same x, one under another. The layers' own weights are views of them."""

    weight: nn.Parameter
    bias: Tensor | None
    rows: list[int]

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return multiply(x, self.weight, self.bias).split(self.rows, -1)


def join(linears: Sequence[nn.Linear]) -> Joined | None:
    """Lay layers' weights into one matrix. None where one has an adapter, is packed, or has a bias that others lack."""
    if not all(type(one) is Linear for one in linears) or len({one.bias is None for one in linears}) > 1:
        return None
    rows = [one.out_features for one in linears]
    whole = {}
    for name in ("weight", "bias"):
        parts = [getattr(one, name) for one in linears]
        whole[name] = None if parts[0] is None else torch.cat([p.detach() for p in parts])
        for part, view in zip(parts, () if whole[name] is None else whole[name].split(rows), strict=False):
            part.data = view
    return Joined(nn.Parameter(whole["weight"], requires_grad=False), whole["bias"], rows)


def weight_of(linear: Any) -> Tensor:
    """Return the matrix that a linear layer multiplies with: unpacked, and with its adapter's product added."""
    if (base := getattr(linear, "base_layer", None)) is not None:
        whole = weight_of(base)
        for name in linear.active_adapters:
            whole = whole + linear.get_delta_weight(name).to(whole.dtype)
        return whole
    unpacked = getattr(linear, "unpacked", None)  # quantized.py
    return linear.weight if unpacked is None else unpacked()
