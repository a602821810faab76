"""What only a card would show, by stand-ins: kernels chosen, formats under sharding, what is frozen, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_strategy, whole_weights
from torch.nn.attention import varlen

from tercet.data.loader import Batch
from tercet.engine import Terms
from tercet.model import attention
from tercet.model.attention import Documents, attend
from tercet.model.experts import has_grouped_matmul
from tercet.spec.kernels import packed_head_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 4])
def test_grouped_heads_never_meet_the_kernel_that_holds_all_scores(monkeypatch, dtype, window):
    """Off the CPU, only flash attention (half precision, no mask) takes grouped heads."""
    seen = []
    real = F.scaled_dot_product_attention

    def record(q, k, v, attn_mask=None, enable_gqa=False, **more):
        seen.append((q.shape[1], k.shape[1], enable_gqa, attn_mask is not None))
        return real(q, k, v, attn_mask=attn_mask, enable_gqa=enable_gqa, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q, k = torch.empty(1, 8, 4, 16, device="meta", dtype=dtype), torch.empty(1, 8, 2, 16, device="meta", dtype=dtype)
    attend(q, k, k, None, 0.25, window)
    ((heads, kv_heads, gqa, masked),) = seen
    assert gqa == (heads != kv_heads)
    assert (heads == kv_heads) or (dtype == torch.bfloat16 and not masked)


@pytest.mark.parametrize("takes_groups", [True, False])
@pytest.mark.parametrize("size", [16, 20])
def test_packed_documents_on_a_card_go_to_flash_attention(monkeypatch, takes_groups, size):
    """On any device that is not the CPU; heads stay grouped where the release's varlen_attn takes them so."""
    seen = []

    def newer(query, key, value, *borders, scale, window_size, enable_gqa=False):
        seen.append((query.shape[1:], key.shape[1:], value.shape[1:], window_size, enable_gqa))
        return torch.empty_like(query)

    def older(query, key, value, *borders, scale, window_size):
        return newer(query, key, value, *borders, scale=scale, window_size=window_size)

    monkeypatch.setattr(varlen, "varlen_attn", newer if takes_groups else older)
    attention._varlen_takes_groups.cache_clear()
    q, k = (torch.empty(1, 8, heads, size, device="meta", dtype=torch.bfloat16) for heads in (4, 2))
    documents = Documents(torch.empty(3, dtype=torch.int32, device="meta"), [3, 5])
    out = attend(q, k, k, documents, 0.25, window=4)
    attention._varlen_takes_groups.cache_clear()
    filled, keys = packed_head_size(size), 2 if takes_groups else 4
    assert seen == [((4, filled), (keys, filled), (keys, filled), (3, 0), takes_groups)]
    assert out.shape == q.shape


def test_experts_on_a_card_are_one_grouped_matmul():
    rows, weight = (torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((5, 16), (2, 24, 16)))
    assert has_grouped_matmul(rows, weight)
    assert not has_grouped_matmul(rows.float(), weight)
    assert not has_grouped_matmul(torch.empty_like(rows, device="cpu"), weight)


def test_borders_on_the_host_are_counted_there():
    """A batch that goes to a card leaves its borders here: reading them there would wait for it."""
    asked = []

    class Moved(torch.Tensor):
        def pin_memory(self):
            asked.append("pinned")
            return self

        def to(self, *args, non_blocking=False, **kwargs):
            asked.append(non_blocking)
            return self

    ids = torch.zeros(1, 4, dtype=torch.long)
    batch = Batch(*(ids.clone().as_subclass(Moved) for _ in range(3)), torch.tensor([0, 4], dtype=torch.int32), [0])
    there = batch.to("meta")
    assert asked == ["pinned", True] * 3
    assert there.documents is batch.documents
    assert Documents.of(there.documents, torch.device("meta")).lengths == [4]


def frozen(world, word: str):
    engine = tiny_engine(world, tiny_strategy(word, world.size, 3), model=tiny_deepseek(), weight_decay=0.5)
    before = whole_weights(engine)
    terms = Terms(engine.spec.balance, mtp_weight=0.0)
    for step in range(2):
        engine.step(micro_batches(step, world.rank, world.size, 1, 3), 1e-2, terms)
    after = whole_weights(engine)
    still = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    engine.step(micro_batches(2, world.rank, world.size, 1, 3), 1e-2, Terms(engine.spec.balance, mtp_weight=0.3))
    last = whole_weights(engine)
    return still, {name for name, tensor in after.items() if torch.equal(tensor, last[name])}


@pytest.mark.parametrize("word", ["ddp", "zero2"])
def test_a_weight_of_zero_freezes_further_predictions(pools, word):
    model = tiny_deepseek()
    further = {t.name for t in (*model.tensors(), *model.buffers()) if t.name.startswith("model.layers.2.")}
    for still, later in pools[3].run(frozen, word):
        assert further and still == further  # bit-equal, and nothing else is
        assert not further & later
