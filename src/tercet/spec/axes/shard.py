"""Sharded data parallel, described: who holds which rows, and what is sent. Twin of parallel/shard.py.

ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) as FSDP2 runs it: one group per layer, and one for the rest.
"""

from __future__ import annotations

from tercet.spec.axes.split import chunk
from tercet.spec.axes.traffic import Collective
from tercet.spec.model import Model, Tensor


def split(rows: int, ranks: int) -> tuple[int, ...]:
    return chunk(rows, ranks)


def padded_elements(tensor: Tensor, ranks: int) -> int:
    """Return what all ranks together store or send of a tensor: every shard has the first one's size."""
    rows = tensor.shape[0]
    return chunk(rows, ranks)[0] * ranks * (tensor.parameters // rows)


def groups(model: Model) -> list[list[Tensor]]:
    """Return the tensors that travel together: each layer's, then those outside."""
    inside: list[list[Tensor]] = [list(block.tensors(prefix, model.width)) for prefix, block in model.blocks()]
    names = {tensor.name for group in inside for tensor in group}
    return [*inside, [tensor for tensor in model.tensors() if tensor.name not in names]]


def traffic(
    model: Model, ranks: int, zero: int, micro_batches: int, reduce_every: bool, weight_bytes: int
) -> list[Collective]:
    """Return the collectives of one optimizer step for zero 1 to 3; payloads padded as FSDP2 pads them."""
    whole = sum(padded_elements(t, ranks) for group in groups(model) for t in group)
    number = len(groups(model))
    gathers = 2 * micro_batches if zero == 3 else 1
    reductions = micro_batches if reduce_every else 1
    return [
        Collective("all_gather", number * gathers, whole * gathers * weight_bytes),
        Collective("reduce_scatter", number * reductions, whole * reductions * 4),
    ]
