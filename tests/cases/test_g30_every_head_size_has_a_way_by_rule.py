"""G30: a head size that flash attention does not take is filled up, or goes document by document."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import varlen

from tercet.model import attention
from tercet.model.attention import Documents, attend
from tercet.planner.answer import plan
from tercet.planner.table import show
from tercet.spec.families import describe
from tercet.spec.kernels import packed_head_size
from tercet.spec.recipe import ModelSection


def test_head_sizes_that_flash_attention_takes():
    assert [packed_head_size(n) for n in (64, 20, 192, 250, 256, 257, 288)] == [64, 24, 192, 256, 256, None, None]


def test_heads_too_large_for_flash_attention_go_document_by_document(monkeypatch):
    monkeypatch.delattr(varlen, "varlen_attn")  # is not even asked for
    q = torch.empty(1, 8, 2, 288, device="meta", dtype=torch.bfloat16)
    assert attend(q, q, q, Documents(torch.empty(3, dtype=torch.int32, device="meta"), [3, 5]), 0.25).shape == q.shape


@pytest.mark.parametrize("model", ["llama-3.2-1b", "deepseek-v2-lite", "first-light"])
@pytest.mark.parametrize(("gpus", "precision"), [("1x4090", "bf16"), ("1x4090", "fp32"), (None, "bf16")])
def test_the_plan_names_the_kernel_that_runs(monkeypatch, model, gpus, precision):
    """What the plan says of a layer against the operator that attention calls with its heads, on a card's stand-in."""
    answer = plan(model, [f"train.precision={precision}"], gpus=gpus, ranks=None if gpus else 1)
    (said,) = answer["attention"]
    called = []

    def varlen_attn(query, *rest, **how):
        called.append(("varlen_attn", query.shape[-1]))
        return torch.empty_like(query)

    def sdpa(query, key, value, **how):
        called.append(("scaled_dot_product_attention", query.shape[-1]))
        return torch.empty_like(query)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(attention._CpuAttention, "apply", lambda q, *rest: sdpa(q, None, None))
    layer = describe(ModelSection(preset=model)).layers[-1].attention
    dtype, device = torch.float32 if precision == "fp32" else torch.bfloat16, "meta" if gpus else "cpu"
    scores, values = (n // layer.heads for n in layer.attention_widths)
    q = torch.empty(1, 8, layer.heads, scores, device=device, dtype=dtype)
    v = torch.empty(1, 8, layer.heads, values, device=device, dtype=dtype)
    attend(q, q, v, Documents(torch.empty(3, dtype=torch.int32, device=device), [3, 5]), 0.25)
    assert {*called} == {(said["kernel"], said["runs_at"])}
    assert said["kernel"] in show(answer)
