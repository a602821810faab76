"""G30: a head size that flash attention does not take is filled up, or goes document by document."""

from __future__ import annotations

import torch
from torch.nn.attention import varlen

from tercet.model.attention import Documents, attend
from tercet.spec.kernels import packed_head_size


def test_head_sizes_that_flash_attention_takes():
    assert [packed_head_size(n) for n in (64, 20, 192, 250, 256, 257, 288)] == [64, 24, 192, 256, 256, None, None]


def test_heads_too_large_for_flash_attention_go_document_by_document(monkeypatch):
    monkeypatch.delattr(varlen, "varlen_attn")  # is not even asked for
    q = torch.empty(1, 8, 2, 288, device="meta", dtype=torch.bfloat16)
    assert attend(q, q, q, Documents(torch.empty(3, dtype=torch.int32, device="meta"), [3, 5]), 0.25).shape == q.shape
