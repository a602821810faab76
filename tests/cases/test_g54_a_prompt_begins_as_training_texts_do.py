"""G54: one rule for the begin token: what training put in front, samples and generate put in front, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from tercet.data import tokenizer
from tercet.inference.served import open_served
from tercet.model.decoder import initial_tensor
from tercet.spec.families import describe
from tercet.spec.recipe import load_recipe
from tercet.training import run
from tercet.weights.writing import save_folder
from tests.texts import documents, made, sentence, write_rows


def folder_of(path, *, bos: str | None):
    """A model's tokenizer: Llama's kind names a begin token, Qwen's has none though config.json speaks of one."""
    tokenizer.train(iter([sentence(n) for n in range(20)]), 300).save(path)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["bos_token"] = bos
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    backend = json.loads((path / "tokenizer.json").read_text())
    backend["post_processor"] = None
    (path / "tokenizer.json").write_text(json.dumps(backend))
    return path


@pytest.mark.parametrize("bos", [None, "<|bos|>"])
def test_training_samples_and_generate_agree(tmp_path, bos):
    bos = None if bos is None else tokenizer.BOS
    words = folder_of(tmp_path / "words", bos=bos)
    path = write_rows(tmp_path / "rows.jsonl", [sentence(1)])
    prepared = made(tmp_path, path, tokenizer=str(words), sequence_tokens=256)
    trained = documents(prepared)[0]
    begins = trained[: len(trained) - len(tokenizer.load(words).encode([sentence(1)])[0]) - 1]
    assert len(begins) == (0 if bos is None else 1)

    given = []

    class Engine:
        def generate(self, prompts, count, temperature=0.0, seed=0):
            given.extend(prompts)
            return [[] for _ in prompts]

    recipe = load_recipe("first-light", [f"data.train={path}", f"train.sample_prompts=['{sentence(1)}']"])
    run._sampler(recipe, prepared, Engine(), None)(1)
    assert given == [trained[:-1]]

    # A folder whose config.json speaks of a begin token, as Qwen's does, whatever its tokenizer does.
    recipe = load_recipe("first-light", ["model.layers=1", "model.width=8", "model.heads=1", "model.vocabulary=300"])
    spec = describe(recipe.model)
    ids = {"eos": prepared.eos_id, "bos": prepared.eos_id, "pad": prepared.pad_id}
    tensors = ((t.name, initial_tensor(t.name, t.shape, t.kind, spec, 0)) for t in spec.tensors())
    save_folder(tmp_path / "model", spec, tensors, torch.float32, words, ids)
    assert open_served(tmp_path / "model").prompt_ids(sentence(1)) == trained[:-1]
