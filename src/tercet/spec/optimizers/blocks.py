"""Moments in eight bits (Dettmers et al. 2021, arXiv 2110.02861): a code per number, a scale per block of a row.

Blocks end where rows end, so whoever cuts a tensor into rows cuts no block: every number of ranks holds the same codes.
Twin of engine/blocks.py, which does the arithmetic.
"""

from __future__ import annotations

from math import prod

BLOCK = 256  # numbers that share a scale, at most
SMALLEST_ROW = 64  # tensors with shorter rows (norms, biases) keep their moments in fp32


def blocks_per_row(shape: tuple[int, ...]) -> int:
    """Return how many scales a row of this tensor has; 0 where its moments stay in fp32."""
    row = prod(shape[1:]) if len(shape) > 1 else 1
    return -(-row // BLOCK) if row >= SMALLEST_ROW else 0


def moment_bytes(shape: tuple[int, ...], rows: int) -> int:
    """Return the bytes of one moment of `rows` rows."""
    row, blocks = prod(shape[1:]), blocks_per_row(shape)
    return rows * (row + 4 * blocks) if blocks else 4 * rows * row
