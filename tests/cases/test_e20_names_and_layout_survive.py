"""E20: file -> model -> file is the identity on tensors, rotary layouts included."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tercet.model.decoder import initial_tensor
from tercet.spec.families.names import stored
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import tiny_model

MODELS = {
    "llama": lambda: tiny_model(),
    "llama-tied": lambda: tiny_model(tied=True),
    "qwen2": lambda: tiny_model(family="qwen2"),
    "qwen3": lambda: tiny_model(family="qwen3"),
    "deepseek_v2": lambda: tiny_deepseek(family="deepseek_v2", mtp_depth=0),
    "deepseek_v3": lambda: tiny_deepseek(),
}


def random_tensors(spec):
    found = {t.name: initial_tensor(t.name, t.shape, t.kind, spec, 3) for t in spec.tensors()}
    for t in spec.buffers():
        found[t.name] = torch.randn(t.shape, generator=torch.Generator().manual_seed(1))
    return found


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_to_model_to_file(name, dtype, tmp_path):
    spec = MODELS[name]()
    save_folder(tmp_path / "a", spec, random_tensors(spec).items(), dtype)
    model = load_model(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {dtype}
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    save_folder(tmp_path / "b", model.spec, state.items(), dtype)
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert set(first) == {part.name for part in stored(spec)}
    assert set(first) == set(second)
    for tensor in first:
        assert torch.equal(first[tensor], second[tensor]), tensor
        kept = tensor.endswith("e_score_correction_bias")
        assert first[tensor].dtype == (torch.float32 if kept else dtype)
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


def test_shards_hold_what_one_file_holds(tmp_path):
    spec = tiny_deepseek()
    tensors = random_tensors(spec)
    save_folder(tmp_path / "one", spec, tensors.items(), torch.float32)
    save_folder(tmp_path / "many", spec, tensors.items(), torch.float32, shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert all(f.stat().st_size < 24_000 for f in (tmp_path / "many").glob("*.safetensors"))
    one, many = load_model(tmp_path / "one"), load_model(tmp_path / "many")
    for name, p in one.named_parameters():
        assert torch.equal(p, many.get_parameter(name))
