"""What native layers keep for backward, by the storages that are alive, equals the description to the byte.

Every kind of block, both formats, every level of recomputation; FLOPs are PyTorch's own count of a real forward.
"""

from __future__ import annotations

import pytest
import torch
from tests.deepseek_tiny import tiny_deepseek
from tests.kept import kept_bytes
from tests.tiny import tiny_model
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tercet.model import experts
from tercet.model.balance import Tally
from tercet.model.decoder import Decoder
from tercet.model.rope import rotary_table
from tercet.parallel.recompute import recompute
from tercet.planner.job import Job
from tercet.planner.ledger import layer_bytes
from tercet.spec.counts import Counts
from tercet.spec.model import Balance, Model

ROWS, TOKENS = 2, 64
SIZES = {torch.float32: 4, torch.bfloat16: 2}
MODELS = {
    "gqa": (tiny_model(), 0),
    "gqa as many keys as queries": (tiny_model(heads=4, kv_heads=4, ffn=100), 0),
    "gqa width 48": (tiny_model(width=48, heads=3, kv_heads=1), 0),
    "gqa with normed heads": (tiny_model(family="qwen3"), 0),
    "latent attention": (tiny_deepseek(), 0),
    "latent attention, queries whole": (tiny_deepseek(q_rank=None), 0),
    "latent attention, wide values": (tiny_deepseek(value_dim=20), 0),
    "experts": (tiny_deepseek(), 1),
    "experts, none shared": (tiny_deepseek(shared_experts=0), 1),
    "further prediction": (tiny_deepseek(), 2),
}


def built(model: Model, dtype: torch.dtype) -> Decoder:
    generator = torch.Generator().manual_seed(5)
    decoder = Decoder(model)
    for p in decoder.parameters():
        p.data = torch.empty(p.shape).normal_(0, 0.02, generator=generator).to(dtype)
    for name, buffer in decoder.named_buffers():
        decoder.get_buffer(name).data = torch.zeros(buffer.shape, dtype=buffer.dtype)
    return decoder


def measured(model: Model, number: int, dtype: torch.dtype, level: str) -> float:
    """Return bytes per token that layer `number` holds between its forward and its backward."""
    decoder = built(model, dtype)
    layer = decoder.model.layers[str(number)]
    recompute(layer, level)
    x = torch.randn(ROWS, TOKENS, model.width, generator=torch.Generator().manual_seed(1)).to(dtype)
    positions = torch.arange(TOKENS).expand(ROWS, TOKENS)
    table = rotary_table(model.rope, model.layers[0].attention.rotary_dim, positions, dtype)
    tally = Tally.of(torch.zeros(ROWS, TOKENS, dtype=torch.long), None, model.balance) if decoder.has_experts else None
    if number < len(model.layers):
        held = kept_bytes(layer, [x], table, lambda layer, x: layer(x, table, None, None, tally))
    else:
        held = kept_bytes(layer, [x, x], table, lambda layer, x, ahead: layer(x, ahead, table, None, tally))
    return held / (ROWS * TOKENS)


def planned(model: Model, number: int, dtype: torch.dtype, level: str, on_gpu: bool) -> float:
    counts = Counts(model)
    block = (*model.layers, *model.mtp)[number]
    kind = next(k for k in counts.kinds if k.layer == block)
    job = Job(ranks=1, micro_batch=ROWS, sequence=TOKENS, activation_bytes=SIZES[dtype])
    return layer_bytes(counts, kind, job, level, on_gpu)


@pytest.mark.parametrize("level", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_a_block_keeps_what_its_description_says(name, dtype, level):
    model, number = MODELS[name]
    expected = planned(model, number, dtype, level, on_gpu=False)
    found = measured(model, number, dtype, level)
    if number == 0:
        assert found == expected
        return
    # Besides what each token has: a handful of numbers per expert (counts, biases), and in bf16 the places that fill
    # each expert's rows up to a multiple of 16.
    experts_numbers = 3 * 8 * 8 / (ROWS * TOKENS)
    filled = 8 * 16 / (ROWS * TOKENS) * (2 * 2 * 12 + 4 + 8) + 16 if dtype == torch.bfloat16 else 0
    assert expected - 1e-6 <= found <= expected + experts_numbers + (filled if level != "full" else 0)


@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_experts_as_a_card_runs_them(level, monkeypatch):
    """One matmul over all experts: the way of a card, on the CPU."""
    monkeypatch.setattr(experts, "has_grouped_matmul", lambda rows, weight: True)
    sizes = {"width": 32, "expert_ffn": 16, "shared_experts": 1}
    model = tiny_deepseek(**sizes)
    found = measured(model, 1, torch.bfloat16, level)
    assert found == pytest.approx(
        planned(model, 1, torch.bfloat16, level, on_gpu=True), abs=3 * 8 * 8 / (ROWS * TOKENS)
    )


@pytest.mark.parametrize("name", ["gqa", "gqa with normed heads", "latent attention", "latent attention, wide values"])
def test_flops_are_those_that_a_forward_runs(name):
    """Without PyTorch's fused kernels, whose counts leave attention out; those look at every token, masked or not."""
    model, _ = MODELS[name]
    decoder = built(model, torch.float32)
    decoder.balance = Balance()
    ids = torch.randint(0, model.vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(2))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        decoder(ids, labels=ids)
    # A forward with labels makes the head's two gradients too: three matmuls instead of one, for every prediction.
    heads, tokens = 1 + len(model.mtp), ROWS * TOKENS
    gradients = 2 * heads * 2 * tokens * model.width * model.vocabulary
    counts = Counts(model)
    # What latent attention is padded with is computed too, and counts for nothing.
    padding = sum(
        2 * max(k.score_width, k.value_width) - k.score_width - k.value_width
        for k in counts.kinds
        for _ in range(k.count)
    )
    assert counter.get_total_flops() - gradients == model.flops(tokens, TOKENS) + 2 * tokens * TOKENS * padding
    attention = sum(2 * TOKENS * (k.score_width + k.value_width) * k.count for k in counts.kinds)
    assert counts.active_matmul_flops() + attention == model.flops(1, TOKENS)
