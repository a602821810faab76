"""G58: files that hold a tensor under its name and under a wrapper's: neither wins in silence."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tercet.errors import InputError
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection
from tercet.weights.reading import load_model
from tercet.weights.writing import write_shards
from tests.parity.families import reference, save
from tests.transformers_tiny import save_tiny

TWO = r"holds .*norm.weight and .*norm.weight, which are two names of one tensor"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model."])
def test_in_one_file(tmp_path, prefix):
    folder = save(reference("llama", torch.float32), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{prefix}model.norm.weight"] = 5 * tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=TWO):
        load_model(folder)


def test_in_two_shards(tmp_path):
    folder = save(reference("llama", torch.float32), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["module.model.norm.weight"] = 5 * tensors["model.norm.weight"]
    (folder / "model.safetensors").unlink()
    write_shards(folder, tensors.items(), shard_bytes=8000)
    with pytest.raises(InputError, match=TWO):
        load_model(folder)


def test_through_transformers_module(tmp_path):
    folder = save_tiny(tmp_path, "gpt_neox")
    tensors = load_file(folder / "model.safetensors")
    name = "gpt_neox.final_layer_norm.weight"
    tensors[f"module.{name}"] = 5 * tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"two names of one tensor"):
        describe(ModelSection(path=str(folder), module="transformers"))


def test_a_wrappers_name_alone_is_read(tmp_path):
    folder = save(reference("llama", torch.float32), tmp_path)
    whole = load_file(folder / "model.safetensors")
    save_file({f"module.{n}": t for n, t in whole.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_model(folder).model.norm.weight, whole["model.norm.weight"])
