"""Eight bits for a moment: the nearest of 256 levels times the largest magnitude of its block. Twin of
spec/optimizers/blocks.py.

The levels are Dettmers et al.'s dynamic ones (arXiv 2110.02861, section 2.1): seven decades, twice as many levels in
each as in the one below. A second moment above zero never becomes zero: the first moment over its root would be a huge
step for a number that is rarely trained.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from tercet.spec.optimizers.blocks import blocks_per_row


@cache
def levels(signed: bool) -> Tensor:
    """Return the 256 levels in [-1, 1], or in [0, 1]."""
    found = [0.0, 1.0]
    for decade in range(7):
        bins = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, bins + 1, dtype=torch.float64)
        means = ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)).tolist()
        found += means + ([-m for m in means] if signed else [])
    return torch.tensor(sorted(found), dtype=torch.float32)


@cache
def borders(signed: bool) -> Tensor:
    """Return what lies halfway between neighbours; unsigned, only zero itself is rounded to zero."""
    of = levels(signed)
    found = (of[1:] + of[:-1]) / 2
    if not signed:
        found[0] = 0.0
    return found


@cache
def _on(device: torch.device, signed: bool) -> tuple[Tensor, Tensor]:
    return levels(signed).to(device), borders(signed).to(device)


def _in_blocks(x: Tensor, blocks: int) -> Tensor:
    """(rows, numbers) -> (rows, blocks, numbers of a block), filled up with zeros."""
    each = -(-x.shape[1] // blocks)
    return F.pad(x, (0, blocks * each - x.shape[1])).view(x.shape[0], blocks, each)


def encode(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """fp32 (rows, …) -> (codes uint8 of the same shape, scales fp32 (rows, blocks))."""
    _, edges = _on(x.device, signed)
    flat = x.reshape(x.shape[0], -1)
    cut = _in_blocks(flat, blocks_per_row(tuple(x.shape)))
    scales = cut.abs().amax(-1)
    relative = cut / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = torch.bucketize(relative, edges, out_int32=True).to(torch.uint8)
    return codes.view(x.shape[0], -1)[:, : flat.shape[1]].reshape(x.shape), scales


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return what the codes stand for, fp32."""
    of, _ = _on(codes.device, signed)
    flat = codes.reshape(codes.shape[0], -1)
    cut = _in_blocks(of[flat.int()], scales.shape[1]) * scales.unsqueeze(-1)
    return cut.view(codes.shape[0], -1)[:, : flat.shape[1]].reshape(codes.shape)
