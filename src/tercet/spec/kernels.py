"""What the attention kernels of cards take. model/attention.py goes by it."""

from __future__ import annotations

LARGEST_HEAD = 256  # flash attention's, on every card since compute capability 8.0
HEAD_MULTIPLE = 8


def packed_head_size(size: int) -> int | None:
    """Return the head size at which flash attention runs packed documents of `size`: filled up with zeros to a
    multiple of 8. None above 256: such heads run document by document."""
    filled = -(-size // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return filled if filled <= LARGEST_HEAD else None
