"""tercet train on an architecture that only transformers has: resumed, exported, loaded, generated from.

On one rank, to be quick; tests/distributed holds every layout to one process.
"""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

import tercet
from tercet.inference.generate import generate_text
from tests.cli import RECIPE
from tests.transformers_tiny import reference, save_tiny


@pytest.mark.slow  # half a minute; tests/distributed has the equalities
def test_train_resume_export(cli):
    save_tiny(cli.folder / "tiny", "gpt_neox", vocab_size=300, max_position_embeddings=128)
    model = "model: {path: tiny, module: transformers}\n"
    (cli.folder / "small.yaml").write_text(model + RECIPE.partition("\n")[2])
    keys = ("train.steps=6", "output.checkpoint_every=3", "train.evaluate_every=3", "train.batch_sequences=6")
    cli.run("train", "small.yaml", "--ranks", "1", "--output", "run", *keys)
    run, losses, weights = cli.folder / "run", cli.losses("run"), cli.weights("run")
    assert losses[-1] < losses[0]
    assert len(cli.events("run", "sample")) == 1
    plan, summary = (json.loads((run / f"{name}.json").read_text()) for name in ("plan", "summary"))
    for row in ("weights", "gradients", "optimizer"):
        assert summary["memory"]["peak"][0][row] == plan["moments"]["peak"][row]
    assert any("not ours" in note for note in plan["notes"])

    # As if it had been ended after step 3: resuming gives the same weights.
    (run / "summary.json").unlink()
    for file in (run / "checkpoints" / "step-000006").iterdir():
        file.unlink()
    (run / "checkpoints" / "step-000006").rmdir()
    again = cli.run("train", "--resume", "run")
    assert "step-000003" in again.stdout + again.stderr
    assert cli.weights("run") == weights
    assert cli.losses("run")[-3:] == losses[-3:]

    theirs, ours = reference(run / "model"), tercet.load_model(run)
    ids = torch.arange(40)[None] * 7 % 300
    torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-6, atol=1e-6)
    prompt = torch.tensor([AutoTokenizer.from_pretrained(run / "model")("The for statement")["input_ids"]])
    expected = theirs.generate(prompt, max_new_tokens=4, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert generate_text(run, "The for statement", 4)[1] == expected
