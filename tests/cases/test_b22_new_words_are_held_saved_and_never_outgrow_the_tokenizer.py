"""B22: three words more, on two ranks under zero3: resized before sharding, tied stays tied, adapters carry the new rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.data.tokenizer import Tokenizer
from tercet.engine import EngineSetup, open_engine
from tercet.errors import InputError
from tercet.parallel.world import World
from tercet.spec.adapter import Adapter, with_adapter
from tercet.spec.families import describe
from tercet.spec.model import Model
from tercet.spec.recipe import ModelSection, OptimSection
from tercet.weights.adapters import save_adapter
from tercet.weights.reading import load_model, stored_weights
from tercet.weights.writing import save_folder
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.chats_tiny import words
from tests.tiny import micro_batches, tiny_model, tiny_strategy

OLD, NEW, ROWS = 67, 70, 4
KNOWN = 20  # ids that the tokenizer has: a vocabulary padded far beyond it
IDS = torch.arange(48)[None] * 7 % NEW


def grown(base: str, tied: bool) -> tuple[Model, Model]:
    """Return (the base with three words more, what is trained of it)."""
    described = describe(ModelSection(path=base, vocabulary=NEW))
    if tied:
        return described, described
    return described, with_adapter(described, Adapter(2, 4.0, modules_to_save=("embed_tokens", "lm_head")))


def trained(world: World, base: str, folder: str, tied: bool):
    described, spec = grown(base, tied)
    strategy = tiny_strategy("zero3", world.size, ROWS, 1)
    setup = EngineSetup(
        spec, strategy, OptimSection(lr=2e-2), "fp32", world, seed=7,
        weights=stored_weights(base, described), vocabulary=KNOWN,
    )  # fmt: skip
    engine = open_engine(setup)
    for step in range(2):
        engine.step(micro_batches(step, world.rank, world.size, 1, ROWS, vocabulary=NEW), 2e-2)
    texts = engine.generate([[1, 2, 3], [66]], 24, temperature=5.0, seed=3)
    weights = {name: value.detach().clone() for name, value in engine.weights()}
    if world.rank == 0:
        if tied:
            save_folder(Path(folder), spec, weights.items(), torch.float32)
        else:
            save_adapter(Path(folder), spec, weights.items(), base)
    return texts, weights


def merged(weights: dict[str, torch.Tensor], base: str) -> dict[str, torch.Tensor]:
    """The whole model's weights, adapters added by the formula."""
    described, _ = grown(base, tied=False)
    stored = stored_weights(base, described)
    found = {d.name: stored.tensor(d.name) for d in described.tensors()}
    found |= {n: w for n, w in weights.items() if ".lora_" not in n}
    for name, a in weights.items():
        if name.endswith("lora_A.weight"):
            plain = name.replace(".lora_A", "")
            found[plain] = found[plain] + 2.0 * weights[name.replace("lora_A", "lora_B")] @ a
    return found


def logits_of(spec: Model, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    import tempfile

    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_folder(Path(folder), spec, weights.items(), torch.float32)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits


@pytest.mark.parametrize("tied", [True, False])
def test_three_words_more(pools, tmp_path, tied):
    base, folder = str(tmp_path / "base"), tmp_path / "out"
    before = random_tensors(tiny_model(tied=tied))
    save_folder(tmp_path / "base", tiny_model(tied=tied), before.items(), torch.float32)
    (texts, weights), (_, others) = pools[2].run(trained, base, str(folder), tied)
    described, _ = grown(base, tied)
    assert max(i for text in texts for i in text) < KNOWN, "ids beyond the tokenizer are never sampled"
    table = weights["model.embed_tokens.weight"]
    assert table.shape[0] == NEW and ("lm_head.weight" in weights) == (not tied)
    # Two steps of 0.02 from the mean: the new rows began there, not at random or zero.
    start = before["model.embed_tokens.weight"].mean(0)
    assert (table[OLD:] - start).abs().max() < 0.07 < (table[:OLD] - start).abs().max()
    assert all(torch.equal(weights[n], others[n]) for n in weights)
    whole = weights if tied else merged(weights, base)
    with torch.no_grad():
        again = load_model(folder, "fp32")(IDS)
    torch.testing.assert_close(again, logits_of(described, whole), rtol=1e-4, atol=1e-4)


def test_an_adapter_beside_a_tied_vocabulary_is_refused(tmp_path):
    save_folder(tmp_path, tiny_model(tied=True), random_tensors(tiny_model(tied=True)).items(), torch.float32)
    described = describe(ModelSection(path=str(tmp_path), vocabulary=NEW))
    with pytest.raises(InputError, match="this model's head is its embedding"):
        with_adapter(described, Adapter(2, 4.0, modules_to_save=("embed_tokens", "lm_head")))


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    """Words were added to the tokenizer alone: said with the size that model.vocabulary needs."""
    from tercet.data.prepare import prepare
    from tests.texts import section, sentence, write_rows

    larger: Tokenizer = words()
    larger.save(tmp_path / "words")
    file = write_rows(tmp_path / "rows.jsonl", [sentence(1)])
    data = section(tmp_path, str(file), tokenizer=str(tmp_path / "words"))
    with pytest.raises(InputError, match=f"has {larger.size} ids, but model.vocabulary is 300") as caught:
        prepare(data, vocabulary=300, model_tokenizer=None, seed=0)
    assert str(larger.size) in caught.value.hint
