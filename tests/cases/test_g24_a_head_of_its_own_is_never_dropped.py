"""G24: config.json says that head and embedding are tied, and the files hold a head of its own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tercet.errors import InputError
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection
from tercet.weights.reading import load_model, open_weights
from tercet.weights.writing import save_folder
from tests.deepseek_tiny import tiny_deepseek
from tests.parity.families import reference, save, tokens
from tests.unit.test_model_formats import random_tensors


@pytest.fixture
def folder(tmp_path):
    """A Llama folder whose config calls it tied and whose head is not."""
    place = save(reference("llama", torch.float32), tmp_path / "m")
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return place


def test_it_is_kept_as_transformers_keeps_it(folder, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens()).logits
    ours = load_model(folder)
    assert torch.allclose(ours(tokens()), theirs, atol=1e-4)
    save_folder(tmp_path / "out", ours.spec, ours.named_parameters(), torch.float32)
    assert "lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_repeats_the_embedding_is_tied(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert load_model(folder).spec.tied


def test_a_recipe_that_ties_it_is_refused(folder):
    spec = describe(ModelSection(path=str(folder), tied=True))
    with pytest.raises(InputError, match=r"lm_head.weight should repeat model.embed_tokens.weight.*\n.*tied=false"):
        open_weights(folder, spec)


def test_copies_inside_further_predictions_are_compared_too(tmp_path):
    spec = tiny_deepseek()
    save_folder(tmp_path, spec, random_tensors(spec).items(), torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    open_weights(tmp_path, spec)
    name = "model.layers.2.shared_head.head.weight"
    tensors[name][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"{name} should repeat lm_head.weight"):
        open_weights(tmp_path, spec)
