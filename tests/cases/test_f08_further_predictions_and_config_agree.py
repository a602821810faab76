"""F08: multi-token prediction is trained, carried bit for bit, or removed with the config's field at 0."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection
from tercet.weights.reading import load_model, open_weights
from tercet.weights.writing import save_folder
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_engine, tiny_strategy


@pytest.fixture
def folder(tmp_path):
    spec = tiny_deepseek()
    save_folder(tmp_path, spec, random_tensors(spec).items(), torch.float32)
    return tmp_path


def test_carried_unchanged(folder, tmp_path_factory):
    again = tmp_path_factory.mktemp("again")
    model = load_model(folder)
    save_folder(
        again, model.spec, {**dict(model.named_parameters()), **dict(model.named_buffers())}.items(), torch.float32
    )
    first, second = (load_file(f / "model.safetensors") for f in (folder, again))
    further = [n for n in first if n.startswith("model.layers.2.")]
    for tensor in ("eh_proj", "embed_tokens", "shared_head.head", "shared_head.norm"):
        assert f"model.layers.2.{tensor}.weight" in further
    assert all(torch.equal(first[n], second[n]) for n in further)
    assert torch.equal(first["model.layers.2.shared_head.head.weight"], first["lm_head.weight"])
    assert json.loads((again / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_trained(pools, folder):
    weights, before = pools[1].run(train_from, str(folder))[0]
    for name in ("model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.down_proj"):
        assert not torch.equal(weights[name], before[name])


def train_from(world, folder):
    spec = describe(ModelSection(path=folder))
    engine = tiny_engine(world, tiny_strategy("single", 1, 4), model=spec)
    before = {n: t.clone() for n, t in engine.weights()}
    engine.step(micro_batches(0, 0, 1, 4, 4), 1e-2)
    return {n: t.clone() for n, t in engine.weights()}, before


def test_removed_with_the_field_at_zero(folder, tmp_path_factory):
    again = tmp_path_factory.mktemp("again")
    model = load_model(folder)
    save_folder(again, model.spec.without_mtp(), dict(model.state_dict()).items(), torch.float32)
    tensors = load_file(again / "model.safetensors")
    assert not any(n.startswith("model.layers.2.") for n in tensors)
    assert json.loads((again / "config.json").read_text())["num_nextn_predict_layers"] == 0
    ids = torch.arange(12)[None]
    assert torch.equal(load_model(again)(ids), model(ids))


def test_switched_off_by_the_recipe_the_files_may_hold_it(folder):
    spec = describe(ModelSection(path=str(folder), mtp_depth=0))
    stored = open_weights(folder, spec)
    assert not any(name.startswith("model.layers.2.") for name, _ in stored)


def test_announced_but_not_there_is_depth_zero(folder):
    """transformers saves DeepSeek-V3 without these layers and leaves the config's field as it was."""
    model = load_model(folder)
    save_folder(folder, model.spec.without_mtp(), dict(model.state_dict()).items(), torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert load_model(folder).spec.mtp == ()
