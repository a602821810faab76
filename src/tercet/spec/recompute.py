"""Which operators' results selective recomputation keeps. parallel/recompute.py goes by it, and so do the blocks' plans.

What costs a matmul or an attention is kept; everything else is computed again. One name per kernel that a model may
meet: on a CPU, on a card, with documents packed into a row, with experts run as one matmul.
"""

from __future__ import annotations

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
