"""G25: ends of text and sampling settings of the folder that a model came from are those of the trained one."""

from __future__ import annotations

import json

import pytest

from tests.cli import Cli
from tests.parity.families import reference, save
from tests.transformers_tiny import save_tiny

SETTINGS = {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "repetition_penalty": 1.05, "eos_token_id": [1, 2]}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A Llama folder with a byte-level tokenizer, two ends of text and sampling settings."""
    import torch

    from tercet.data.tokenizer import train

    place = tmp_path_factory.mktemp("source")
    made = train(iter(["the for statement is used to iterate"] * 9), 260)
    made.save(place)
    save(reference("llama", torch.float32), place)
    sized = save_tiny(
        place / "sized", "llama", vocab_size=320, num_key_value_heads=2, eos_token_id=[1, 2], bos_token_id=0
    )
    for file in sized.iterdir():
        file.rename(place / file.name)
    (place / "generation_config.json").write_text(json.dumps(SETTINGS))
    return place


def train_once(cli: Cli, source, *more: str):
    recipe = cli.folder / "tune.yaml"
    text = (cli.folder / "small.yaml").read_text().splitlines()[1:]
    recipe.write_text("\n".join([f"model: {source}", *text]).replace("tokenizer: train", "tokenizer: model"))
    done = cli.run("train", "tune.yaml", "train.steps=1", "--output", "run", "strategy=single", *more)
    assert done.stdout.rstrip().endswith(f"Talk to it: tercet chat {cli.folder / 'run'}"), done.stdout
    model = cli.folder / "run" / "model"
    return [json.loads((model / f).read_text()) for f in ("config.json", "generation_config.json")]


@pytest.mark.slow
def test_they_stay(tmp_path, text_cache, source):
    config, generation = train_once(Cli(tmp_path, text_cache), source)
    assert {**generation, "eos_token_id": [1, 2]} == {**SETTINGS, "bos_token_id": 0, "pad_token_id": 2}
    assert generation["eos_token_id"] == config["eos_token_id"] == [1, 2]
    assert config["bos_token_id"] == 0


@pytest.mark.slow
def test_through_transformers_module_too(tmp_path, text_cache, source):
    config, generation = train_once(Cli(tmp_path, text_cache), f"{{path: {source}, module: transformers}}")
    assert config["eos_token_id"] == generation["eos_token_id"] == [1, 2]
    assert generation["temperature"] == 0.6


@pytest.mark.slow
def test_another_tokenizer_brings_its_own_ids_and_leaves_the_sampling(tmp_path, text_cache, source):
    config, generation = train_once(Cli(tmp_path, text_cache), source, "data.tokenizer=train")
    assert config["eos_token_id"] == generation["eos_token_id"] == 1
    assert generation["temperature"] == 0.6
