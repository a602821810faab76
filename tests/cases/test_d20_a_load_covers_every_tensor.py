"""D20: wrappers' prefixes are taken off; a missing, unexpected or misshapen tensor is an error that lists names."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.errors import InputError
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder
from tests.cases.test_e20_names_and_layout_survive import MODELS, random_tensors


@pytest.fixture(params=["llama", "deepseek_v3"])
def folder(request, tmp_path):
    spec = MODELS[request.param]()
    save_folder(tmp_path, spec, random_tensors(spec).items(), torch.float32)
    return tmp_path


def rewrite(folder, change):
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model.", "module._orig_mod."])
def test_known_prefixes_load_equal(folder, prefix):
    expected = dict(load_model(folder).named_parameters())
    rewrite(folder, lambda tensors: {prefix + name: t for name, t in tensors.items()})
    got = dict(load_model(folder).named_parameters())
    assert all(torch.equal(got[name], t) for name, t in expected.items())


def test_compiled_layers_load_equal(folder):
    expected = dict(load_model(folder).named_parameters())
    rewrite(folder, lambda tensors: {n.replace("layers.1.", "layers.1._orig_mod."): t for n, t in tensors.items()})
    got = dict(load_model(folder).named_parameters())
    assert all(torch.equal(got[name], t) for name, t in expected.items())


def test_a_missing_tensor_is_named(folder):
    lost = "model.layers.0.mlp.down_proj.weight"
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != lost})
    with pytest.raises(InputError, match=rf"missing 1 \({lost}\)"):
        load_model(folder)


def test_an_unexpected_tensor_is_named(folder):
    rewrite(folder, lambda tensors: {**tensors, "model.layers.0.adapter.weight": torch.ones(2)})
    with pytest.raises(InputError, match=r"unexpected 1 \(model.layers.0.adapter.weight\)"):
        load_model(folder)


def test_nothing_that_matches_is_an_error(folder):
    rewrite(folder, lambda tensors: {f"other.{n}": t for n, t in tensors.items()})
    with pytest.raises(InputError, match=r"missing \d+ .*unexpected \d+ .*\(0 of \d+ found\)"):
        load_model(folder)


def test_a_wrong_shape_is_named(folder):
    rewrite(folder, lambda tensors: {**tensors, "model.norm.weight": torch.ones(5)})
    with pytest.raises(InputError, match=r"model.norm.weight has shape \(5,\), expected \(32,\)"):
        load_model(folder)


def test_a_missing_shard_is_named(folder):
    file = folder / "model.safetensors"
    names = list(load_file(file))
    index = {"weight_map": {n: "model-00001-of-00002.safetensors" if k % 2 else file.name for k, n in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"model-00001-of-00002.safetensors"):
        load_model(folder)
