"""G32: a damaged header, an index that points elsewhere, aliases without end: an error that names the file, at once."""

from __future__ import annotations

import json

import pytest
import torch

from tercet.errors import InputError
from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection, load_recipe
from tercet.weights.reading import load_model
from tests.parity.families import reference, save


@pytest.fixture
def folder(tmp_path):
    return save(reference("llama-one-kv-head-tied", torch.float32), tmp_path / "m")


def header(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def entry(**changed) -> bytes:
    value = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changed}
    return header(json.dumps({"model.norm.weight": value}).encode()) + bytes(16)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        (2**62).to_bytes(8, "little") + b"{}",
        header(b"not json"),
        header(b"[1]"),
        header(b"\xff\xfe{}"),
        header(b"[" * 100_000),
        header(b'{"a": 3}'),
        entry(shape="2"),
        entry(shape=[-2, -2]),
        entry(shape=[2.0, 2]),
        entry(data_offsets=[16, 0]),
        entry(data_offsets=[0, 12]),
        entry(data_offsets=[0, 10**12], shape=[10**12 // 4]),
        entry(dtype=["F32"]),
        header(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
        )
        + b"12",
        header(
            b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}'
        )
        + b"123",
    ],
)
def test_a_damaged_header(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"m/model.safetensors is (not a safetensors file|cut short)"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/hostname", "sub/../../x", "..", "", "a/b.safetensors"])
def test_an_index_stays_in_its_folder(folder, tmp_path, name):
    (tmp_path / "x.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"model.norm.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"index.json names .*, which is no file of its folder"):
        load_model(folder)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "\x00"])
def test_a_damaged_index(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index.json is not an index of shards"):
        load_model(folder)


def test_aliases_that_multiply_end(tmp_path):
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    recipe = tmp_path / "bomb.yaml"
    recipe.write_text("a0: &a0 [x, x]\n" + "\n".join(levels) + "\ndata: {train: x}\n")
    with pytest.raises(InputError, match=r"bomb.yaml: more than 20000 values"):
        load_recipe(recipe)


def test_sections_without_end(tmp_path):
    recipe = tmp_path / "deep.yaml"
    recipe.write_text("a: " + "[" * 5000 + "]" * 5000)
    with pytest.raises(InputError, match=r"deep.yaml"):
        load_recipe(recipe)
    recipe.write_text("a: &a [*a]\n")
    with pytest.raises(InputError, match=r"deep.yaml"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "32"),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 2.5),
        ("rms_norm_eps", "small"),
        ("rope_theta", -1),
        ("tie_word_embeddings", "no"),
        ("rope_scaling", [1]),
        ("rope_parameters", {"rope_type": 3}),
        ("eos_token_id", "</s>"),
        ("vocab_size", True),
        ("model_type", ["llama"]),
    ],
)
def test_a_config_of_wrong_types(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(InputError, match=key):
        describe(ModelSection(path=str(folder)))
