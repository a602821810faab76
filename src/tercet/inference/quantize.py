"""Weights in fewer bits for generating: int8 by PyTorch alone, int4 (NF4) by bitsandbytes. Activations stay as they are.

int8: each row of a matrix has one scale, its largest magnitude / 127. NF4: blocks of 64 numbers share a scale, their
sixteen values are the quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314). Embeddings, the head,
norms and what an attention block multiplies by itself keep their format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tercet.errors import InputError
from tercet.units import show_bytes

KINDS = ("int8", "int4")
KEPT = ("kv_b_proj", "lm_head", "router", "gate")  # absorbed in latent attention; the head; who goes to which expert
TOKENS_COMPARED = 32
KERNEL_WIDTH = 32  # PyTorch's int8 kernel for CPUs ends the process for rows that this does not divide
LEAST_SHARE = 0.5  # of the weights that must become smaller, or it is not worth it


@dataclass(frozen=True)
class Quantized:
    """What it cost and what it saved. `difference`: the largest one between logits, as a share of the largest logit;
    `same`: share of places whose most probable token stayed."""

    kind: str
    bytes_before: int
    bytes_after: int
    difference: float
    same: float

    def __str__(self) -> str:
        return (
            f"{self.kind}: weights {show_bytes(self.bytes_after)} instead of {show_bytes(self.bytes_before)}; logits of a "
            f"test text differ by {self.difference:.1%} of the largest, the most probable token is the same in "
            f"{self.same:.0%} of its places"
        )


class Int8Linear(nn.Module):
    """x (..., in) -> (..., out) with the weight (out, in) as int8 and one scale a row."""

    weight: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        wide = linear.weight.detach().float()
        scale = wide.abs().amax(1).clamp_min(1e-12) / 127
        self.register_buffer("weight", (wide / scale[:, None]).round_().to(torch.int8))
        self.register_buffer("scale", scale.to(linear.weight.dtype))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        weight, scale = self.weight, self.scale
        if x.is_cpu and x.dtype == torch.bfloat16 and weight.shape[1] % KERNEL_WIDTH == 0:
            out = torch._weight_int8pack_mm(x.flatten(0, -2), weight, scale).view(*x.shape[:-1], -1)
        else:
            out = F.linear(x, weight.to(x.dtype)) * scale
        return out if self.bias is None else out + self.bias


@torch.no_grad()
def quantize(model: nn.Module, kind: str, vocabulary: int) -> Quantized:
    """Make a model's matrices smaller, in place, one at a time. Raises InputError for what would gain too little."""
    if kind not in KINDS:
        raise InputError(f"--quantize is {kind!r}; it must be int8 or int4")
    found = [
        (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear) and name not in KEPT
    ]
    before = _bytes(model)
    share = sum(child.weight.nbytes for *_, child in found) / before
    if share < LEAST_SHARE:
        raise InputError(
            f"--quantize {kind} would reach {share:.0%} of this model's weights: experts and embeddings keep their format",
            "Leave it out, or export to GGUF and quantise there.",
        )
    make = _int8 if kind == "int8" else _int4()
    ids = torch.arange(TOKENS_COMPARED, device=next(model.parameters()).device)[None] * 7919 % vocabulary
    was = model(ids)[0, :, :vocabulary].float()
    for parent, name, child in found:
        setattr(parent, name, make(child))
    now = model(ids)[0, :, :vocabulary].float()
    difference = ((now - was).abs().max() / was.abs().max()).item()
    same = (now.argmax(-1) == was.argmax(-1)).float().mean().item()
    return Quantized(kind, before, _bytes(model), difference, same)


def _int8(linear: nn.Linear) -> nn.Module:
    return Int8Linear(linear)


def _int4() -> Any:
    try:
        from bitsandbytes import nn as small
    except ImportError:
        raise InputError("--quantize int4 needs bitsandbytes", "pip install 'tercet[quantize]'") from None
    linear4bit, params4bit = cast(Any, small.Linear4bit), cast(Any, small.Params4bit)

    def make(linear: nn.Linear) -> nn.Module:
        weight = linear.weight.detach()
        with torch.device("meta"):
            made = linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=weight.dtype,
                quant_type="nf4",
            )
        made.weight = params4bit(weight, requires_grad=False, quant_type="nf4").to(weight.device)
        made.bias = linear.bias
        return made

    return make


def _bytes(model: nn.Module) -> int:
    return sum(t.nbytes for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
