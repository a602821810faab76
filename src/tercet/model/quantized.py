"""A frozen linear layer in nf4 (QLoRA, arXiv 2305.14314), packed and unpacked by bitsandbytes.

Blocks of 64 values share a scale; scales are quantised again, 256 sharing one (double quantisation), as bitsandbytes
does. The packed values are a parameter that sharding cuts by rows; the scales, 3 % of its size, are whole on every
rank.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.errors import InputError
from tercet.spec.adapter import NF4_BLOCK, NF4_OUTER_BLOCK

STORAGE = torch.bfloat16  # the packed bytes as sharding moves them: in the type of their neighbours


class NF4Linear(nn.Linear):
    """x (..., inputs) -> (..., outputs) with a weight of 4 bits; unpacked in x's type at each use, kept nowhere."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__(inputs, outputs, bias)
        self.weight = nn.Parameter(torch.empty(outputs, inputs // 4, dtype=STORAGE), requires_grad=False)
        scales = -(-inputs * outputs // NF4_BLOCK)
        for name, size, dtype in (
            ("scales", (scales,), torch.uint8),
            ("outer_scales", (-(-scales // NF4_OUTER_BLOCK),), torch.float32),
            ("offset", (), torch.float32),
        ):
            self.register_buffer(name, torch.empty(size, dtype=dtype), persistent=False)

    def reset_parameters(self) -> None:
        """Nothing: whoever builds the module fills it."""

    def pack(self, weight: Tensor) -> Tensor:
        """Return the packed values of a whole weight, (outputs, inputs // 4) of STORAGE; its scales are kept here."""
        from bitsandbytes.functional import quantize_4bit

        packed, state = quantize_4bit(
            weight.contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
        )
        outer: Any = state.state2
        self.scales, self.outer_scales, self.offset = state.absmax, outer.absmax, state.offset
        return packed.view(-1).view(STORAGE).view(self.out_features, self.in_features // 4)

    def unpacked(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight, (outputs, inputs)."""
        return _unpack(self.weight, self._state(dtype or torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        return _Frozen.apply(x, self.weight, self.bias, self._state(x.dtype))

    def _state(self, dtype: torch.dtype) -> Any:
        from bitsandbytes.functional import QuantState

        code, outer_code = _codes(self.weight.device)
        return QuantState(
            absmax=self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=code,
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=dtype,
            offset=self.offset,
            state2=QuantState(
                absmax=self.outer_scales, code=outer_code, blocksize=NF4_OUTER_BLOCK, dtype=torch.float32
            ),
        )


class _Frozen(torch.autograd.Function):
    """x Wᵀ + bias for a weight without gradient: backward unpacks it again instead of keeping it."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, bias: Tensor | None, state: Any) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.state = state
        return F.linear(x, _unpack(packed, state), bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (packed,) = ctx.saved_tensors
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return grad @ _unpack(packed, ctx.state), None, grad_bias, None


def _unpack(packed: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed.reshape(-1).view(torch.uint8).unsqueeze(1), state)


@cache
def _codes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 16 values of nf4 and the 256 of the scales' own format."""
    from bitsandbytes.functional import create_dynamic_map, get_4bit_type

    return get_4bit_type("nf4", device=device), create_dynamic_map().to(device)


def require_bitsandbytes() -> None:
    """Raise InputError where it is missing."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it says which kernels it looked for
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        raise InputError(
            "adapter.quantize=nf4 needs bitsandbytes, which is not installed", "pip install 'tercet[adapters]'"
        ) from None
