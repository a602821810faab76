"""Seconds of one operator on a card: the larger of arithmetic and memory traffic (roofline), by the card's figures.

FLOPs of matrix products and attention come from PyTorch's own flop counter; every other operator moves its inputs and
outputs once. What a kernel reads twice or keeps in its cache is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from tercet.rehearsal.kernels import OPERATIONS

WORD_OF = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


@dataclass(frozen=True)
class CardRates:
    """What a card and its links do, in FLOP/s, bytes/s and seconds.

    `flops`: by number format ("bf16", "fp32"); a format that is missing runs at fp32's rate.
    """

    flops: dict[str, float] = field(default_factory=lambda: {"fp32": 80e12, "bf16": 160e12})
    memory: float = 1000e9
    to_card: float = 24e9
    to_host: float = 24e9
    peer: float = 20e9
    launch: float = 5e-6
    collective_latency: float = 30e-6

    def slowed(self, factor: float) -> CardRates:
        """Return the rates of a card that takes `factor` times as long for its own work; its links stay."""
        return replace(self, flops={k: v / factor for k, v in self.flops.items()}, memory=self.memory / factor)

    def of(self, dtype: torch.dtype) -> float:
        word = WORD_OF.get(dtype, "fp32")
        return self.flops.get(word, self.flops.get("fp32", 1e12))


def flops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the floating-point operations of an operator that PyTorch's counter knows; 0 for the others."""
    if (own := OPERATIONS.get(operator)) is not None:
        return own(*args, **kwargs)
    formula = flop_registry.get(operator._overloadpacket)
    if formula is None:
        return 0.0
    return float(formula(*args, **kwargs, out_val=out))


def operator_seconds(rates: CardRates, operations: float, moved_bytes: int, dtype: torch.dtype) -> float:
    return max(operations / rates.of(dtype), moved_bytes / rates.memory)


def collective_seconds(rates: CardRates, kind: str, payload_bytes: int, ranks: int) -> float:
    """Return a ring's time: each rank sends and receives (ranks - 1) / ranks of the payload, twice for all_reduce."""
    if ranks < 2:
        return 0.0
    passes = 2 if "allreduce" in kind else 1
    return rates.collective_latency + passes * payload_bytes * (ranks - 1) / ranks / rates.peer
