"""Other people's files: pickled .bin shards, DeepSeek's FP8 blocks, larger vocabularies, old names."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import tiny_model

from tercet.errors import InputError
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection
from tercet.weights.pickled import import_bin
from tercet.weights.reading import load_model, open_weights
from tercet.weights.writing import save_folder


@pytest.fixture
def folder(tmp_path):
    spec = tiny_model()
    save_folder(tmp_path / "model", spec, random_tensors(spec).items(), torch.float32)
    return tmp_path / "model"


def as_bin(folder, shards=2):
    """Turn a folder's safetensors into .bin shards with an index, as hub repositories of 2023 hold them."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, index = list(tensors), {}
    for n in range(shards):
        file = f"pytorch_model-{n + 1:05d}-of-{shards:05d}.bin"
        held = {name: tensors[name].clone() for name in names[n::shards]}
        torch.save(held, folder / file)
        index |= dict.fromkeys(held, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))


# ---------------------------------------------------------------------------------------------------- .bin files


def test_bin_shards_are_not_opened_unasked(folder):
    expected = load_model(folder)
    as_bin(folder)
    with pytest.raises(InputError, match=r"has no model.safetensors .*\n.*tercet fetch .* --import-bin"):
        load_model(folder)
    import_bin(folder, folder)
    model = load_model(folder)
    assert all(torch.equal(p, expected.get_parameter(n)) for n, p in model.named_parameters())


def test_bin_import_into_another_folder(folder, tmp_path):
    expected = load_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)  # as before torch 1.6
    (folder / "tokenizer.json").write_text("{}")
    import_bin(folder, tmp_path / "new", shard_bytes=20_000)
    assert len(list((tmp_path / "new").glob("*.safetensors"))) > 1
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    model = load_model(tmp_path / "new")
    assert all(torch.equal(p, expected.get_parameter(n)) for n, p in model.named_parameters())


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("evil-was-here",))


def test_code_in_a_bin_file_does_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"a": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="holds more than tensors and was not opened"):
        import_bin(folder, tmp_path / "new")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(InputError):
        import_bin(folder, tmp_path / "new")
    assert not (tmp_path / "evil-was-here").exists()


def test_bin_faults_name_the_file(folder, tmp_path):
    as_bin(folder)
    (folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(InputError, match=r"missing pytorch_model-00002-of-00002.bin"):
        import_bin(folder, tmp_path / "new")
    (folder / "pytorch_model-00002-of-00002.bin").write_bytes(b"PK\x03\x04broken")
    with pytest.raises(InputError, match=r"pytorch_model-00002-of-00002.bin cannot be read"):
        import_bin(folder, tmp_path / "new")


# ---------------------------------------------------------------------------------------------------- FP8 blocks


def test_fp8_blocks_are_multiplied_with_their_scales(tmp_path):
    """Every matrix as DeepSeek-V3's files have it: e4m3 numbers, one fp32 scale per block of rows and columns."""
    height, width = 8, 12  # of other sizes than DeepSeek's 128 x 128
    spec = tiny_deepseek()
    save_folder(tmp_path, spec, random_tensors(spec).items(), torch.float32)
    tensors, expected, stored = load_file(tmp_path / "model.safetensors"), {}, {}
    for name, value in tensors.items():
        if value.dim() != 2 or "proj" not in name or "eh_proj" in name:
            stored[name] = expected[name] = value
            continue
        rows, columns = value.shape
        scales = torch.empty(-(-rows // height), -(-columns // width))
        quantised, back = torch.empty_like(value), torch.empty_like(value)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
                scales[i, j] = value[part].abs().max() / 448
                quantised[part] = value[part] / scales[i, j]
                back[part] = quantised[part].to(torch.float8_e4m3fn).float() * scales[i, j]
        stored[name], stored[name + "_scale_inv"] = quantised.to(torch.float8_e4m3fn), scales
        expected[name] = back
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [height, width]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, "fp32")
    save_folder(tmp_path / "again", model.spec, model.state_dict().items(), torch.float32)
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, value in expected.items():
        assert torch.equal(again[name], value), name
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    rows = open_weights(tmp_path, model.spec).rows("model.layers.0.mlp.down_proj.weight", 5, 19)
    assert torch.equal(rows, expected["model.layers.0.mlp.down_proj.weight"][5:19])


def test_fp8_without_its_scales_is_an_error(tmp_path):
    spec = tiny_model()
    save_folder(tmp_path, spec, random_tensors(spec).items(), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=f"{name} is FP8 but {name}_scale_inv is missing"):
        load_model(tmp_path)


# -------------------------------------------------------------------------------------------- sizes and old names


@pytest.mark.parametrize("tied", [False, True])
def test_a_larger_vocabulary_starts_at_the_mean(tmp_path, tied):
    spec = tiny_model(tied=tied)
    tensors = random_tensors(spec)
    save_folder(tmp_path, spec, tensors.items(), torch.float32)
    larger = describe(ModelSection(path=str(tmp_path), vocabulary=80))
    stored = open_weights(tmp_path, larger)
    for name in ("model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))):
        got = stored.tensor(name)
        assert got.shape == (80, 32)
        assert torch.equal(got[:67], tensors[name])
        torch.testing.assert_close(got[67:], tensors[name].mean(0).expand(13, -1))
        assert torch.equal(stored.rows(name, 60, 75), got[60:75])
        assert torch.equal(stored.rows(name, 70, 80), got[70:80])


def test_a_smaller_vocabulary_is_an_error(folder):
    smaller = describe(ModelSection(path=str(folder), vocabulary=60))
    with pytest.raises(InputError, match=r"model.embed_tokens.weight has shape \(67, 32\), expected \(60, 32\)"):
        open_weights(folder, smaller)


def test_tables_of_old_checkpoints_are_passed_over(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    load_model(folder)


def test_rows_of_experts_are_those_experts(tmp_path):
    spec = tiny_deepseek()
    tensors = random_tensors(spec)
    save_folder(tmp_path, spec, tensors.items(), torch.float32)
    stored = open_weights(tmp_path, spec)
    for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"):
        assert torch.equal(stored.rows(name, 3, 6), tensors[name][3:6])
        assert stored.rows(name, 8, 8).shape[0] == 0


def test_experts_may_lie_stacked(tmp_path):
    spec = tiny_deepseek(mtp_depth=0)
    tensors = random_tensors(spec)
    save_folder(tmp_path, spec, tensors.items(), torch.float32)
    stacked = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if ".experts." not in n}
    stacked |= {n: t for n, t in tensors.items() if ".mlp.experts." in n}
    save_file(stacked, tmp_path / "model.safetensors")
    model = load_model(tmp_path)
    assert all(torch.equal(p, tensors[n]) for n, p in model.named_parameters())


def test_a_model_that_lacks_a_tensor_is_not_saved(tmp_path):
    spec = tiny_model()
    tensors = random_tensors(spec)
    del tensors["model.norm.weight"]
    with pytest.raises(InputError, match=r"no value for model.norm.weight"):
        save_folder(tmp_path, spec, tensors.items(), torch.float32)


def test_generation_settings_and_template_are_kept(folder, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": [5, 6]}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_bytes(b"of another model")
    spec = tiny_model()
    save_folder(tmp_path / "out", spec, random_tensors(spec).items(), torch.bfloat16, source, {"bos": 1, "eos": None})
    out = tmp_path / "out"
    assert json.loads((out / "generation_config.json").read_text()) == {
        "temperature": 0.6,
        "eos_token_id": [5, 6],
        "bos_token_id": 1,
    }
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert load_model(out).spec.tensors() == load_model(folder).spec.tensors()
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_two_sets_of_weights_side_by_side_are_refused(folder):
    shards = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    save_file({"model.norm.weight": torch.ones(3)}, folder / shards["model.norm.weight"])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(InputError, match="two sets of weights"):
        load_model(folder)
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")})
    )
    load_model(folder)  # an index of the one file says the same
