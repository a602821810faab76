"""D03: one stored tensor and the flag; reload shares storage, transformers agrees, a further step keeps them one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tercet.parallel.world import World
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder
from tests.tiny import micro_batches, tiny_engine, tiny_model, tiny_strategy


def export(world: World, word: str, folder: str):
    engine = tiny_engine(world, tiny_strategy(word, world.size, 4), model=tiny_model(tied=True))
    engine.step(micro_batches(0, world.rank, world.size, 1, 4), 1e-2)
    if world.rank == 0:
        save_folder(Path(folder), engine.spec, engine.weights(), torch.float32)
    else:
        list(engine.weights())
    engine.step(micro_batches(1, world.rank, world.size, 1, 4), 1e-2)
    return sorted(name for name, _ in engine.weights())


@pytest.mark.parametrize("word", ["ddp", "zero3"])
def test_tied(pools, tmp_path, word):
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    names = pools[2].run(export, word, str(tmp_path / "m"))[0]
    assert "lm_head.weight" not in names
    with safe_open(tmp_path / "m" / "model.safetensors", framework="pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    ours = load_model(tmp_path / "m")
    assert ours.head_weight.data_ptr() == ours.model.embed_tokens.weight.data_ptr()
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.lm_head.weight.data_ptr() == theirs.model.embed_tokens.weight.data_ptr()
    ids = torch.arange(12)[None]
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
