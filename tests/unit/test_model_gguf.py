"""GGUF files written by the gguf package, as llama.cpp's converter lays them out, read back as the model they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.tiny import tiny_model

from tercet.errors import InputError
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder

gguf = pytest.importorskip("gguf")


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own permutation of Llama's query and key rows (convert_hf_to_gguf, `permute`)."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def write(path, spec, tensors, arch, quantised=False):
    writer = gguf.GGUFWriter(str(path), arch)
    attention, ffn = spec.layers[0].attention, spec.layers[0].feedforward
    writer.add_block_count(len(spec.layers))
    writer.add_context_length(spec.context_tokens)
    writer.add_embedding_length(spec.width)
    writer.add_feed_forward_length((getattr(ffn, "experts", 0) and 64) or ffn.ffn)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    writer.add_token_list([f"w{n}" for n in range(spec.vocabulary)])
    if arch == "qwen3moe":
        writer.add_expert_count(ffn.experts)
        writer.add_expert_used_count(ffn.experts_per_token)
        writer.add_expert_feed_forward_length(ffn.ffn)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), len(spec.layers))
    for name, tensor in tensors.items():
        value = tensor.numpy()
        pieces = {name: value}
        if name.endswith("experts.gate_up_proj"):
            stem, half = name.removesuffix("gate_up_proj"), value.shape[1] // 2
            pieces = {f"{stem}gate_proj.weight": value[:, :half], f"{stem}up_proj.weight": value[:, half:]}
        elif name.endswith("experts.down_proj"):
            pieces = {f"{name}.weight": value}
        for piece, data in pieces.items():
            if arch == "llama" and ".q_proj." in piece:
                data = permuted(data, attention.heads)
            if arch == "llama" and ".k_proj." in piece:
                data = permuted(data, attention.kv_heads)
            data = np.ascontiguousarray(data)
            written = names.get_name(piece, try_suffixes=(".weight", ".bias"))
            if quantised and data.ndim == 2:
                q8 = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(written, gguf.quantize(data, q8), raw_dtype=q8)
            else:
                writer.add_tensor(written, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


CASES = {
    "llama": {},
    "llama-tied-biases": {"tied": True, "kv_heads": 1},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3moe": {
        "family": "qwen3_moe",
        "head_dim": 16,
        "experts": 4,
        "experts_per_token": 2,
        "expert_ffn": 8,
        "normalize_experts": True,
    },
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_model_in_the_file_is_the_model_written(name, tmp_path):
    spec = tiny_model(**CASES[name])
    tensors = random_tensors(spec)
    save_folder(tmp_path / "folder", spec, tensors.items(), torch.float32)
    path = tmp_path / "model.gguf"
    write(path, spec, tensors, name.split("-")[0])
    ours, expected = load_model(path), load_model(tmp_path / "folder")
    for tensor, p in expected.named_parameters():
        assert torch.equal(ours.get_parameter(tensor), p), tensor
    ids = torch.arange(20)[None]
    assert torch.equal(ours(ids), expected(ids))


def test_quantised_values_are_what_the_blocks_mean(tmp_path):
    spec = tiny_model(ffn=64)
    tensors = random_tensors(spec)
    write(tmp_path / "q8.gguf", spec, tensors, "llama", quantised=True)
    ours = load_model(tmp_path / "q8.gguf")
    for tensor, value in tensors.items():
        got = ours.get_parameter(tensor)
        assert got.dtype == torch.float32
        # Q8_0: 32 numbers share a scale of their largest over 127; half a step of rounding, and the scale is fp16.
        torch.testing.assert_close(got, value, rtol=0, atol=float(value.abs().max()) / 127 * 0.51 + 1e-6)


def test_llama3_scaling_follows_from_the_frequency_table(tmp_path):
    """The file stores divisors; the rule behind them is found and checked."""
    from tercet.model.rope import scaled_frequencies
    from tercet.spec.model import Rope

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = tiny_model(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    position = torch.zeros(1, 1, dtype=torch.int64)
    plain = scaled_frequencies(Rope(500_000.0), 64, position)[0]
    divisors = plain / scaled_frequencies(spec.rope, 64, position)[0]
    tensors = random_tensors(spec)
    path = tmp_path / "model.gguf"
    original = gguf.GGUFWriter.write_header_to_file

    def with_table(self, *args, **kwargs):
        self.add_tensor("rope_freqs.weight", divisors.numpy())
        original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_table)
        write(path, spec, tensors, "llama")
    assert describe(ModelSection(path=str(path))).rope == spec.rope


def test_faults_have_sentences(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(InputError, match="is not a GGUF file"):
        load_model(tmp_path / "x.gguf")
    with pytest.raises(InputError, match="no package 'no_such_package' is installed"):
        load_model("package:no_such_package/x.gguf")
    with pytest.raises(InputError, match=r"the package has no 'x.gguf'"):
        load_model("package:tercet/x.gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "g.gguf"), "gemma3")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InputError, match="GGUF architecture 'gemma3' is not built"):
        load_model(tmp_path / "g.gguf")
