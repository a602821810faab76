"""AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101) where torch's fused one does not reach: moments in eight bits,
weights in bf16 alone. Twin of spec/optimizers.

Works through each tensor some rows at a time, in fp32, so what exists besides state and gradients is small. Nothing in
it depends on who holds which rows: any number of ranks makes the same updates, bit for bit, from the same gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from tercet.engine.blocks import decode, encode
from tercet.engine.shards import Reader
from tercet.parallel.parameter_shard import ParameterShard
from tercet.spec.optimizers.adamw import MOMENTS, scale_of
from tercet.spec.optimizers.blocks import blocks_per_row

SLICE = 1 << 22  # numbers updated at once
SIGNED = {"exp_avg": True, "exp_avg_sq": False}


def fresh_state(value: Tensor, in_blocks: bool) -> dict[str, Tensor]:
    """Return a part's state before its first update: the count, the moments, and the scales of those in blocks."""
    state = {"step": torch.zeros((), dtype=torch.float32, device=value.device)}
    blocks = blocks_per_row(tuple(value.shape)) if in_blocks else 0
    for moment in MOMENTS:
        if not blocks:
            state[moment] = torch.zeros_like(value, dtype=torch.float32)
            continue
        state[moment], state[scale_of(moment)] = encode(
            torch.zeros_like(value[:1], dtype=torch.float32), SIGNED[moment]
        )
        for key in (moment, scale_of(moment)):
            state[key] = state[key].expand(value.shape[0], *state[key].shape[1:]).contiguous()
    return state


class RowAdamW(torch.optim.Optimizer):
    """`updates` counts those done; whoever steps it sets it, so nothing is asked of the device."""

    updates = 0

    def __init__(self, groups: Sequence[dict[str, Any]], parts: Sequence[ParameterShard], seed: int, **defaults: Any):
        super().__init__(groups, defaults)
        self._parts = {part.value: part for part in parts}
        self._seed = seed

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    self._update(value, group)
                    self.state[value]["step"] += 1

    def _update(self, value: Tensor, group: dict[str, Any]) -> None:
        state, part = self.state[value], self._parts[value]
        assert value.grad is not None
        for rows in _slices(value):
            new = value[rows].float()
            gradient = value.grad[rows].to(new.dtype)
            first, second = (_read(state, moment, rows) for moment in MOMENTS)
            advance(new, gradient, first, second, self.updates + 1, group)
            for moment, found in zip(MOMENTS, (first, second), strict=True):
                _write(state, moment, rows, found)
            if value.dtype == torch.bfloat16:
                begin = (part.region.begin + rows.start) * value[0].numel()
                round_by_chance(new, _key(self._seed, self.updates, part.name), begin)
            value[rows] = new


def advance(new: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: int, group: dict[str, Any]) -> None:
    """Update number `count` of fp32 weights and moments, in place."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    new.mul_(1 - lr * group["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = second.sqrt().div_(sqrt(1 - beta2**count)).add_(group["eps"])
    new.addcdiv_(first, root, value=-lr / (1 - beta1**count))


def _slices(value: Tensor) -> Iterator[slice]:
    step = max(1, SLICE // max(1, value[0].numel()))
    for begin in range(0, value.shape[0], step):
        yield slice(begin, min(begin + step, value.shape[0]))


def _read(state: dict[str, Tensor], moment: str, rows: slice) -> Tensor:
    """Return fp32 rows of a moment: the state's own, or what its codes stand for."""
    scales = state.get(scale_of(moment))
    return state[moment][rows] if scales is None else decode(state[moment][rows], scales[rows], SIGNED[moment])


def _write(state: dict[str, Tensor], moment: str, rows: slice, found: Tensor) -> None:
    if (scales := state.get(scale_of(moment))) is not None:
        state[moment][rows], scales[rows] = encode(found, SIGNED[moment])


# ------------------------------------------------------------------------------------------- stochastic rounding


def _key(seed: int, update: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{update}:{name}".encode(), digest_size=8).digest(), "big")


def round_by_chance(x: Tensor, key: int, begin: int) -> None:
    """Round fp32 numbers to bf16's, in place: up or down with the chances that keep the mean.

    bf16 is fp32 without its lower 16 bits: a random number below 2^16 added to them carries as often as they are
    large. The random number follows from `key` and each number's place in its tensor, of which x begins at `begin`.
    """
    bits = x.view(torch.int32).view(-1)
    bits.add_(chance(key, begin, bits.numel(), x.device)).bitwise_and_(-(1 << 16))


def chance(key: int, begin: int, count: int, device: torch.device) -> Tensor:
    """Return `count` random 16-bit numbers, int32: a hash of their places (two rounds of xorshift and multiply)."""
    offset = (key + begin) % (1 << 32)
    x = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(offset))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(_signed(factor))
    return (x >> 16).bitwise_and_(0xFFFF)


def _signed(number: int) -> int:
    """Return the 32-bit pattern as the signed number that int32 arithmetic takes."""
    return number - (1 << 32) if number >= 1 << 31 else number


# -------------------------------------------------------------------------------------------------- saved state


def saved_moments(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor of rows) of all that a checkpoint holds of a part besides its weights."""
    for moment in MOMENTS:
        for key in (moment, scale_of(moment)):
            if key in state:
                yield key, state[key]


def restore_moment(state: dict[str, Tensor], moment: str, reader: Reader, part: ParameterShard) -> None:
    """Read a part's rows of a moment from a save, whichever way that holds it: codes stay codes, bit for bit."""
    scale = scale_of(moment)
    saved = reader.keys()
    if f"{scale}/{part.name}" in saved:
        rows, blocks = part.value.shape[0], blocks_per_row(tuple(part.value.shape))
        device = part.value.device
        codes = torch.empty(part.value.shape, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, blocks, dtype=torch.float32, device=device)
        reader.read_into(f"{moment}/{part.name}", part.region.begin, codes)
        reader.read_into(f"{scale}/{part.name}", part.region.begin, scales)
        if scale in state:
            state[moment].copy_(codes)
            state[scale].copy_(scales)
        else:
            state[moment].copy_(decode(codes, scales, SIGNED[moment]))
        return
    if scale not in state:
        reader.read_into(f"{moment}/{part.name}", part.region.begin, state[moment])
        return
    plain = torch.empty(part.value.shape, dtype=torch.float32, device=part.value.device)
    reader.read_into(f"{moment}/{part.name}", part.region.begin, plain)
    _write(state, moment, slice(None), plain)
