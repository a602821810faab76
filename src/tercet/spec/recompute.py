"""Which blocks are recomputed, and which operators' results selective recomputation keeps. parallel/recompute.py goes by it, and so do the blocks' plans.

What costs a matmul or an attention is kept; everything else is computed again. One name per kernel that a model may
meet: on a CPU, on a card, with documents packed into a row, with experts run as one matmul.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

KEPT_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "torch_attn::_varlen_attn",
)

EVERY = re.compile(r"every-([1-9]\d*)")


def every(recompute: str) -> int | None:
    """Return n of `every-n`: of n blocks the first is recomputed, the others keep what they need."""
    found = EVERY.fullmatch(recompute)
    return int(found.group(1)) if found else None


def level_of(recompute: str, block: int) -> str:
    """Return the level of one block, counted from 0, further predictions included: none, selective or full."""
    n = every(recompute)
    if n is None:
        return recompute
    return "none" if block % n else "full"


@cache  # a plan asks for the same blocks some thousand times
def levels(recompute: str, blocks: tuple[int, ...]) -> tuple[tuple[str, int], ...]:
    """Return (level, how many of these blocks have it)."""
    return tuple(Counter(level_of(recompute, block) for block in blocks).items())
