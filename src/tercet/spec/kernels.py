"""Which attention kernel runs, and at which head size. model/attention.py goes by it, and plans name it."""

from __future__ import annotations

LARGEST_HEAD = 256  # flash attention's, on every card since compute capability 8.0
HEAD_MULTIPLE = 8


def packed_head_size(size: int) -> int | None:
    """Return the head size at which flash attention runs packed documents of `size`: filled up with zeros to a
    multiple of 8. None above 256: such heads run document by document."""
    filled = -(-size // HEAD_MULTIPLE) * HEAD_MULTIPLE
    return filled if filled <= LARGEST_HEAD else None


VARLEN, SDPA = "varlen_attn", "scaled_dot_product_attention"


def attention_kernel(on_card: bool, half: bool, head_size: int) -> tuple[str, int]:
    """Return (kernel, head size that it runs at) for packed documents. `half`: queries in bf16 or fp16.

    varlen_attn is flash attention over all documents in one call; the other takes documents of about one length
    together. Neither lets a token see another document.
    """
    if on_card and half and (filled := packed_head_size(head_size)) is not None:
        return VARLEN, filled
    return SDPA, head_size
