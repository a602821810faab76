"""The two shipped set-ups for three RTX 4090, at a tiny size on three CPU processes, same keys: train, resume, export."""

from __future__ import annotations

import json

import pytest
import torch

from tests.deepspeed_tiny import needs_deepspeed

pytestmark = needs_deepspeed
RECIPES = {"three-4090-llama-1.2b-zero3": (3, 1), "three-4090-deepseek-7b-zero2-offload": (2, 1)}
SMALL = (
    "model.layers=2",
    "model.width=64",
    "model.heads=4",
    "model.ffn=96",
    "model.vocabulary=300",
    "data.sequence_tokens=64",
    "optim.warmup_steps=2",
)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_resumes_exports(cli, recipe):
    zero, accumulation = RECIPES[recipe]
    out = cli.run(
        "train", recipe, *SMALL, "train.steps=4", "output.checkpoint_every=2", "--ranks", "3", "--output", "run"
    )
    assert f"deepspeed-zero{zero} on 3 ranks" in out.stderr
    assert f"accumulation {accumulation} x ranks 3; effective batch 12 sequences" in out.stderr
    config = json.loads((cli.folder / "run" / "ds_config.json").read_text())
    assert config["train_batch_size"] == 12
    assert config["train_micro_batch_size_per_gpu"] == 4 // accumulation
    assert config["zero_optimization"]["stage"] == zero
    assert "auto" not in json.dumps(config)
    assert ("offload_optimizer" in config["zero_optimization"]) == (zero == 2)
    losses = cli.losses("run")
    assert len(losses) == 4 and losses[-1] < losses[0]
    console = out.stdout + out.stderr
    assert "DeepSpeed]" not in console and "Warning" not in console and "INFO" not in console

    resumed = cli.run("train", "--resume", "run", "train.steps=5", "--ranks", "2")
    assert "weights, exp_avg, exp_avg_sq, position; next step 5 (saved on 3 ranks, now 2)" in resumed.stderr
    assert [row["step"] for row in cli.events("run", "step")] == [1, 2, 3, 4, 5]

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(cli.folder / "run" / "model")
    assert model.config.num_hidden_layers == 2 and model.config.hidden_size == 64
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape == (1, 3, 300) and torch.isfinite(logits).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_headers_say_what_was_wrong_and_how_to_run(recipe):
    from tercet.spec.recipe import find_recipe, load_recipe

    text = find_recipe(recipe).read_text(encoding="utf-8")
    assert f"tercet plan {recipe} --gpus 3x4090" in text
    assert f"tercet train {recipe}" in text
    loaded = load_recipe(recipe)
    assert loaded.train.batch_sequences == 12 and loaded.optim.lr == 5e-5 and loaded.optim.schedule == "linear"
