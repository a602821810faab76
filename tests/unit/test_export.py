"""tercet export: what is written is what was trained, for transformers and in GGUF's own terms (D13, F02, F06, F08)."""

from __future__ import annotations

import json

import pytest
import torch
from tests.served_tiny import save_served
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tercet.cli import app
from tercet.data.tokenizer import load
from tercet.errors import InputError, TercetError
from tercet.inference.served import open_served
from tercet.weights.reading import load_model

SHAPES = {
    "llama": {"tied": True},
    "mistral": {"family": "mistral", "head_dim": 12},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "family": "qwen3_moe",
        "head_dim": 8,
        "experts": 4,
        "experts_per_token": 2,
        "expert_ffn": 12,
        "normalize_experts": True,
    },
}
IDS = torch.tensor([[5, 99, 320, 0, 17, 203]])


def run(*arguments):
    done = CliRunner().invoke(app, ["export", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_gguf_file_is_the_model(name, tmp_path):
    source = save_served(tmp_path / "m", **SHAPES[name])
    out = tmp_path / "m.gguf"
    run(source, "--format", "gguf", "--output", out, "--dtype", "fp32")
    ours, again = load_model(source), load_model(out)
    assert torch.equal(again(IDS), ours(IDS))
    was, now = open_served(source), open_served(out)
    assert now.template == was.template and now.tokenizer.bos_id == was.tokenizer.bos_id == 0
    if name in ("llama", "qwen2"):  # an independent reader; of qwen3 it does not read the size of heads
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
        assert torch.allclose(theirs(IDS).logits, ours(IDS), atol=1e-3)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
        text = "the for 模型🙂 12"
        assert tokenizer.encode(text, add_special_tokens=False) == load(source).encode([text])[0].tolist()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_is_cast_once(dtype, tmp_path):
    source = save_served(
        tmp_path / "m", family="qwen3_moe", **{k: v for k, v in SHAPES["qwen3_moe"].items() if k != "family"}
    )
    done = run(source, "--format", "gguf", "--output", tmp_path / "m.gguf", "--dtype", dtype, "--json")
    assert json.loads(done.stdout.splitlines()[-1])["format"] == "gguf"
    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    ours, again = (dict(load_model(p, "fp32").named_parameters()) for p in (source, tmp_path / "m.gguf"))
    for tensor, value in ours.items():
        if value.dim() > 1 and "gate.weight" not in tensor:
            assert torch.equal(again[tensor], value.to(kind).float()), tensor


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_a_folder_for_transformers(dtype, tmp_path):
    source = save_served(tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9], "temperature": 0.3}))
    out = tmp_path / "out"
    run(source, "--output", out, "--shard", "20kB", *(("--dtype", dtype) if dtype else ()))
    assert len(list(out.glob("*.safetensors"))) > 2
    theirs, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    kind = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert theirs.dtype == kind
    assert json.loads((out / "config.json").read_text())["dtype"] == str(kind).removeprefix("torch.")
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1, 9]
    assert torch.equal(theirs.get_input_embeddings().weight, load_model(source).model.embed_tokens.weight.to(kind))
    assert (out / "chat_template.jinja").is_file() and "parameters" in (out / "README.md").read_text()


def test_what_differs_when_read_back_is_not_kept(tmp_path, monkeypatch):
    source = save_served(tmp_path / "m")
    monkeypatch.setattr(
        "tercet.weights.gguf_writing.half_split_rows", lambda rows, heads: __import__("numpy").arange(rows)
    )
    with pytest.raises(TercetError, match=r"q_proj.weight differs"):
        run(source, "--format", "gguf", "--output", tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path):
    source = save_served(tmp_path / "m", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(InputError, match="no dynamic rotary scaling"):
        run(source, "--format", "gguf", "--output", tmp_path / "m.gguf")
    (tmp_path / "there").write_text("x")
    with pytest.raises(InputError, match="there exists"):
        run(source, "--output", tmp_path / "there")
