"""For every preset, the module built holds exactly the tensors that the description promises, in its order."""

from __future__ import annotations

import pytest
import torch

from tercet.model.decoder import Decoder
from tercet.spec.blocks.moe import MoE
from tercet.spec.families import preset, presets
from tercet.spec.families.names import parts, stored
from tests.deepseek_tiny import tiny_deepseek


def build(spec):
    with torch.device("meta"):
        return Decoder(spec)


@pytest.mark.parametrize("name", list(presets()))
def test_names_shapes_and_order(name):
    spec = preset(name)
    module = build(spec)
    assert [(n, tuple(p.shape)) for n, p in module.named_parameters()] == [(t.name, t.shape) for t in spec.tensors()]
    persistent = set(module.state_dict()) - {n for n, _ in module.named_parameters()}
    assert persistent == {t.name for t in spec.buffers()}
    assert spec.parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "deepseek-moe-16b", "qwen2.5-0.5b"])
def test_kinds_and_axes_fit_the_shapes(name):
    spec = preset(name)
    for t in spec.tensors():
        assert len(t.axes) == len(t.shape), t.name
        assert t.kind in {"embedding", "head", "matrix", "norm", "bias", "router", "expert"}
        assert (t.kind == "norm") == ("norm" in t.name), t.name
        assert (t.kind == "expert") == (".mlp.experts." in t.name), t.name


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_what_is_stored_is_what_is_held(name):
    """On disk experts lie apart and further predictions repeat embedding and head; nothing else is added."""
    spec = preset(name)
    held = sum(t.parameters for t in (*spec.tensors(), *spec.buffers()))
    copies = 2 * len(spec.mtp) * spec.vocabulary * spec.width
    sizes = [torch.Size(part.shape).numel() for part in stored(spec)]
    assert sum(sizes) == held + copies
    assert len({part.name for part in stored(spec)}) == len(sizes)
    for t in spec.tensors():
        covered = sum(torch.Size(part.shape).numel() for part in parts(t))
        assert covered == t.parameters


def test_idle_parameters_are_those_no_token_meets():
    """A token's gradient reaches active parameters only: idle experts' are zero."""
    spec = tiny_deepseek(mtp_depth=0)
    torch.manual_seed(0)
    module = Decoder(spec)
    for p in module.parameters():
        torch.nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.2)
    module(torch.tensor([[3]]), labels=torch.tensor([[5]])).backward()
    moe = spec.layers[1].feedforward
    assert isinstance(moe, MoE)
    experts = module.model.layers["1"].mlp.experts
    reached = sum(int((p.grad[e] != 0).any()) * p[e].numel() for p in experts.parameters() for e in range(moe.experts))
    total = sum(p.numel() for p in experts.parameters())
    assert spec.idle_parameters == total - reached
