"""D02, F01, D13 for adapters: what is saved under sharding is every trained tensor; peft loads it; merged once, in fp32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tercet import load_model
from tercet.errors import InputError
from tercet.inference.export import export_hf
from tercet.inference.generate import answers
from tercet.inference.sampling import Sampling
from tercet.inference.served import open_served
from tests.cli import Cli
from tests.served_tiny import save_served

RECIPE = """\
model: {path: base}
adapter: {kind: lora, rank: 3, alpha: 6, targets: ["*.[qv]_proj", mlp.down_proj], modules_to_save: [lm_head, model.norm]}
data:
  train: {path: "package:pydoc_data/topics.py", format: python}
  sequence_tokens: 64
  long_rows: split
optim: {lr: 2e-2}
train: {batch_sequences: 6, steps: 3, precision: PRECISION, sample_prompts: ["the for"], sample_tokens: 4}
"""
ZERO3 = ("strategy=zero3", "--ranks", "3", "--output", "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_cache) -> Cli:
    cli = Cli(tmp_path_factory.mktemp("adapters"), text_cache)
    save_served(cli.folder / "base", tied=False)
    (cli.folder / "lora.yaml").write_text(RECIPE.replace("PRECISION", "fp32"))
    done = cli.run("train", "lora.yaml", *ZERO3)
    assert "adapter: beside q_proj (2), v_proj (2), down_proj (2)" in done.stdout + done.stderr
    return cli


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def theirs(folder: Path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


IDS = torch.arange(40)[None] * 5 % 320


def test_the_file_holds_every_trained_tensor_and_no_other(trained: Cli):
    found = load_file(trained.folder / "run/adapter/adapter_model.safetensors")
    assert len(found) == 2 * 6 + 2
    assert all(value.numel() and value.isfinite().all() and value.dtype == torch.float32 for value in found.values())
    moved = [name for name, value in found.items() if ".lora_B." in name and value.abs().max() > 0]
    assert len(moved) == 6, "every B began at zero and was trained"
    assert found["base_model.model.lm_head.weight"].shape == (352, 32)
    assert not (trained.folder / "run/model").exists()


def test_a_checkpoint_holds_the_adapter_and_its_states_alone(trained: Cli):
    names = set()
    for path in (trained.folder / "run/checkpoints").glob("step-*/rank-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    adapters = {n.partition("/")[2] for n in names}
    assert all(".lora_" in n or n in ("lm_head.weight", "model.norm.weight") for n in adapters)
    assert len(names) == 3 * 14


def test_peft_loads_it_and_gives_the_same_logits(trained: Cli):
    from peft import PeftModel

    peft = PeftModel.from_pretrained(theirs(trained.folder / "base"), trained.folder / "run/adapter")
    expected = logits(peft, IDS)
    with torch.no_grad():
        ours = load_model(trained.folder / "run", "fp32")(IDS)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert (expected - logits(theirs(trained.folder / "base"), IDS)).abs().max() > 0.05
    sample = trained.events("run", "sample")[-1]
    for place in ("run", "run/adapter"):  # what training sampled with adapters, merged weights say too
        (answer,) = answers(open_served(trained.folder / place), ["the for"], 4, Sampling(), [], 1)
        assert answer.text == sample["text"]


def test_merged_once_by_transformers_logits(trained: Cli, tmp_path: Path):
    from peft import PeftModel

    expected = logits(PeftModel.from_pretrained(theirs(trained.folder / "base"), trained.folder / "run/adapter"), IDS)
    said: list[str] = []
    run, merged = str(trained.folder / "run"), trained.folder / "merged"
    export_hf(run, merged, None, 50_000, said.append, merge=True)
    assert any("logits differ by" in line for line in said)
    assert len(list(merged.glob("*.safetensors"))) > 1, "shard by shard"
    torch.testing.assert_close(logits(theirs(merged), IDS), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="nothing to merge"):
        export_hf(str(merged), tmp_path / "twice", None, 10**9, said.append, merge=True)
    with pytest.raises(InputError, match="is an adapter of"):
        export_hf(run, tmp_path / "plain", None, 10**9, said.append)
    export_hf(f"{run}/adapter", trained.folder / "small", "bf16", 10**9, said.append, merge=True)
    assert {v.dtype for v in load_file(trained.folder / "small/model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((trained.folder / "small/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
def test_a_merge_into_the_run_leaves_the_adapter(trained: Cli):
    shutil.copytree(trained.folder / "run", trained.folder / "copy")
    trained.run("export", "copy", "--merge")
    assert (trained.folder / "copy/model/model.safetensors").is_file()
    assert (trained.folder / "copy/adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_model_name_or_path": "gone/away/model"}, "is an adapter of gone/away/model, which is not here"),
        ({"use_dora": True}, "use_dora=true is not understood"),
        ({"peft_type": "IA3"}, 'peft_type="IA3" is not understood'),
    ],
)
def test_what_cannot_be_added_is_refused(trained: Cli, tmp_path: Path, change, says):
    folder = tmp_path / "adapter"
    shutil.copytree(trained.folder / "run/adapter", folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(InputError, match=says):
        load_model(folder)


@pytest.mark.slow
def test_an_adapter_does_not_go_on_over_another_base(trained: Cli):
    """A checkpoint holds what is trained and nothing of the base: one that was replaced would change the model in silence."""
    (weights,) = (trained.folder / "base").glob("*.safetensors")
    before, tensors = weights.read_bytes(), load_file(weights)
    try:
        save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1e-3}, weights, {"format": "pt"})
        done = trained.run("train", "--resume", "run", "train.steps=5", code=2)
        assert "have changed since this run began" in done.stderr
    finally:
        weights.write_bytes(before)
    trained.run("train", "--resume", "run", "train.steps=5")
