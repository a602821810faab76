"""D02: under stage 3 a parameter is empty until it is gathered; what is written has every tensor, whole, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tercet.errors import InputError
from tercet.parallel.world import World
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder
from tests.deepspeed_tiny import engine_of, layout, needs_deepspeed
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy

ROWS = 4


def write(world: World, name: str, folder: Path):
    if name.startswith("deepspeed-"):
        engine = engine_of(world, layout(name.removeprefix("deepspeed-"), world.size, ROWS), ROWS)
    else:
        engine = tiny_engine(world, tiny_strategy(name, world.size, ROWS, 1))
    engine.step(micro_batches(0, world.rank, world.size, 1, ROWS), 1e-2)
    if world.rank == 0:
        save_folder(folder, tiny_model(), engine.weights(), torch.float32)
    else:
        list(engine.weights())
    batch = micro_batches(1, 0, 1, 1, 1)[0]
    return engine.evaluate(batch)[0]


@pytest.mark.parametrize(
    "name",
    [
        "zero3",
        pytest.param("deepspeed-zero3", marks=needs_deepspeed),
        pytest.param("deepspeed-zero3-weights", marks=needs_deepspeed),
    ],
)
def test_the_written_model_has_every_trained_tensor_whole(pools, tmp_path, name):
    losses = pools[2].run(write, name, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        written = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert written == {t.name: tuple(t.shape) for t in tiny_model().tensors()}
    batch = micro_batches(1, 0, 1, 1, 1)[0]
    model = load_model(tmp_path)
    with torch.no_grad():
        again = model(batch.input_ids, positions=batch.positions, documents=batch.documents, labels=batch.labels)
    assert losses == pytest.approx([again.item()] * 2, rel=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t[:0], "shape (0, 32), expected (67, 32)"),
        (lambda t: t.flatten(), "shape (2144,)"),
        (lambda t: None, "no value for"),
    ],
)
def test_an_empty_misshapen_or_missing_tensor_is_an_error_with_its_name(tmp_path, damage, words):
    spec, name = tiny_model(), "model.embed_tokens.weight"
    tensors = {t.name: torch.zeros(t.shape) for t in spec.tensors()}
    damaged = damage(tensors.pop(name))
    if damaged is not None:
        tensors[name] = damaged
    with pytest.raises(InputError) as caught:
        save_folder(tmp_path, spec, tensors.items(), torch.float32)
    assert name in str(caught.value) and words in str(caught.value)
    assert not list(tmp_path.glob("*.safetensors"))
