"""What native layers keep for backward, counted by autograd's own hooks, equals the description to the byte."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_model

from tercet.model.decoder import Decoder
from tercet.model.rope import rotary_table
from tercet.planner.counts import Counts
from tercet.planner.job import Job
from tercet.planner.ledger import layer_bytes

ROWS, TOKENS = 2, 64


def kept_bytes(model, dtype: torch.dtype) -> float:
    """Return bytes per token that one layer's forward saves, parameters and the shared rotary table left out."""
    decoder = Decoder(model)
    for p in decoder.parameters():
        p.data = torch.full(p.shape, 0.01, dtype=dtype)
    x = torch.randn(ROWS, TOKENS, model.width, dtype=dtype, requires_grad=True)
    table = rotary_table(
        model.rope, model.layers[0].attention.head_dim, torch.arange(TOKENS).expand(ROWS, TOKENS), dtype
    )
    outside = {t.untyped_storage().data_ptr() for t in (*decoder.parameters(), *table)}
    held, seen = [], {}

    def pack(tensor):
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        decoder.model.layers["0"](x, table)
    return sum(seen.values()) / (ROWS * TOKENS)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize(
    "sizes", [{}, {"heads": 4, "kv_heads": 4, "ffn": 100}, {"width": 48, "heads": 3, "kv_heads": 1}]
)
def test_a_layer_keeps_what_the_description_says(dtype, size, sizes):
    model = tiny_model(**sizes)
    counts = Counts(model)
    job = Job(ranks=1, micro_batch=ROWS, sequence=TOKENS, activation_bytes=size)
    assert kept_bytes(model, dtype) == layer_bytes(counts, counts.kinds[0], job, "none")


def test_recomputing_keeps_less_level_by_level():
    counts = Counts(tiny_model())
    job = Job(ranks=1, micro_batch=1, sequence=64)
    none, selective, full = (layer_bytes(counts, counts.kinds[0], job, r) for r in ("none", "selective", "full"))
    assert none > selective > full == 2 * 32
