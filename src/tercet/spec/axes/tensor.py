"""Tensor parallel, described: heads, inner widths and vocabulary are cut (Megatron, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from math import gcd

from tercet.spec.axes.split import divisors_near, either
from tercet.spec.axes.traffic import Collective
from tercet.spec.model import Model


def legal(model: Model, size: int) -> list[str]:
    """Return the sentences that refuse a cut into `size`; empty when every size divides."""
    if size == 1:
        return []
    parts: dict[str, int] = {}
    for layer in model.layers:
        parts["heads"] = layer.attention.heads
        if kv_heads := getattr(layer.attention, "kv_heads", None):
            parts["key-value heads"] = kv_heads
        parts["feed-forward width"] = layer.feedforward.ffn
    parts["vocabulary"] = model.vocabulary
    bad = [f"{n} {what}" for what, n in parts.items() if n % size]
    if not bad:
        return []
    common = gcd(*parts.values())
    ways = f"sizes that divide all of them: {either(divisors_near(common, size, 4))}"
    return [
        f"strategy.tensor: {size} does not divide {', '.join(bad)} (a sum over ranks needs equal parts); {ways}; "
        f"or use {size} ranks without cutting tensors: zero 1 to 3 take any number"
        + (f", and pipeline: {size} cuts {len(model.layers)} layers unevenly" if size <= len(model.layers) else "")
    ]


def traffic(layers: int, row_bytes: float, micro_batches: int, recomputing: bool) -> list[Collective]:
    """Return the all-reduces of the residual row of one micro-batch's tokens (`row_bytes`), section 3 of the paper.

    Two forward and two backward in every layer, and the forward's again where it is recomputed.
    """
    number = (4 + 2 * recomputing) * layers * micro_batches
    return [Collective("all_reduce", "activations", number, number * row_bytes)]
