"""F08: multi-token prediction is trained, carried bit for bit, or removed with the config's field at 0."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tercet.engine import EngineSetup, Terms
from tercet.engine.native import NativeEngine
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection, OptimSection
from tercet.weights.reading import load_model, open_weights, stored_weights
from tercet.weights.writing import save_folder
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.deepseek_tiny import tiny_deepseek
from tests.tiny import micro_batches, tiny_strategy


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


def train_and_export(world, word: str, folder: str, depth: int, weight: float, out: str):
    """Two steps from the folder's weights, then the export of a run: through rank 0, gathered from all."""
    spec = describe(ModelSection(path=folder, mtp_depth=depth))
    strategy = tiny_strategy(word, world.size, 4)
    engine = NativeEngine(
        EngineSetup(spec, strategy, OptimSection(eps=1e-3), "fp32", world, seed=7, weights=stored_weights(folder, spec))
    )
    for step in range(2):
        engine.step(micro_batches(step, world.rank, world.size, 1, 4), 1e-2, Terms(spec.balance, weight))
    if world.rank == 0:
        save_folder(Path(out), spec, engine.weights(), torch.float32, source=Path(folder))
    else:
        list(engine.weights())
    world.meet()


@pytest.mark.parametrize(
    ("word", "depth", "weight"), [("zero3", 1, 0.3), ("ddp", 1, 0.0), ("zero3", 1, 0.0), ("zero3", 0, 0.0)]
)
def test_a_run_trains_carries_or_removes(pools, folder, tmp_path_factory, word, depth, weight):
    """With a weight of 0 they are carried through a run bit for bit; switched off, keys and config say so."""
    out = tmp_path_factory.mktemp("out")
    pools[2].run(train_and_export, word, str(folder), depth, weight, str(out))
    before, after = (load_file(f / "model.safetensors") for f in (folder, out))
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == depth
    own = {n for n in before if n.startswith("model.layers.2.") and ".embed_tokens." not in n and ".head." not in n}
    assert own and not torch.equal(before["model.layers.1.mlp.gate.weight"], after["model.layers.1.mlp.gate.weight"])
    if depth == 0:
        assert after.keys() == {n for n in before if not n.startswith("model.layers.2.")}
        assert load_model(out).spec.mtp == ()
    else:
        assert after.keys() == before.keys()
        same = {n: torch.equal(before[n], after[n]) for n in own}
        assert all(same.values()) if weight == 0 else not any(v for n, v in same.items() if "proj" in n)


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
