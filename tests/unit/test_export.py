"""tercet export: what is written is what was trained, for transformers and in GGUF's own terms (D13, F02, F06, F08)."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
from tests.served_tiny import CHATML, save_served
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tercet.cli import app
from tercet.data.tokenizer import load
from tercet.errors import InputError, TercetError
from tercet.inference.ollama import DIALOGUES
from tercet.inference.served import open_served
from tercet.spec.families.gguf import reader
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


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_answers_end_in_a_gguf_file_where_the_model_ends_them(tmp_path, where):
    """A model of chats ends its answers at <|im_end|>, its tokenizer ends texts at another token."""
    source = save_served(tmp_path / "m")
    turn = load(source).backend.token_to_id("<|im_end|>")
    config = json.loads((source / where).read_text())
    (source / where).write_text(json.dumps({**config, "eos_token_id": [turn]}))
    run(source, "--format", "gguf", "--output", tmp_path / "m.gguf")
    was, now = open_served(source), open_served(tmp_path / "m.gguf")
    assert turn in was.stop and set(now.stop) == set(was.stop)
    assert now.tokenizer.eos_id == was.tokenizer.eos_id != turn
    fields = reader(tmp_path / "m.gguf").fields
    assert fields["tokenizer.ggml.eot_token_id"].contents() == turn


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


LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m['role'] + '<|end|>\n\n' + m['content'] | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant: {% endif %}"
)
OWN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are tiny.<|im_end|>\n' }}{% endif %}" + CHATML
)


def ollama_renders(text, messages):
    """What Ollama makes of a chat: the Modelfile's own lines, read by a renderer of the one form that is written."""
    template = re.search(r'TEMPLATE """(.*?)"""', text, re.S)[1]
    own = re.search(r'SYSTEM """(.*?)"""', text, re.S)
    if own and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": own[1]}, *messages]
    loop, behind = re.fullmatch(
        r"\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*)", template, re.S
    ).groups()
    parts = re.split(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}', loop)[1:]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    return "".join(bodies[m["role"]].replace("{{ .Content }}", m["content"]) for m in messages) + behind


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA_3, DEEPSEEK, OWN_SYSTEM], ids=["chatml", "llama3", "deepseek", "own"]
)
def test_ollama_reads_chats_as_the_model_was_trained_to(template, tmp_path):
    """F03: five dialogues from the exported files' own metadata have the ids of training's template."""
    source = save_served(tmp_path / "m", template=template)
    run(source, "--format", "ollama", "--output", tmp_path / "out")
    text = (tmp_path / "out" / "Modelfile").read_text()
    served, exported = open_served(source), open_served(tmp_path / "out" / "model.gguf")
    for messages in DIALOGUES:
        rendered = ollama_renders(text, messages)
        begin = [exported.tokenizer.bos_id]  # llama.cpp puts it in front, as the file says
        assert [*begin, *exported._chat_backend.encode(rendered, add_special_tokens=False).ids] == served.chat_ids(
            messages
        )
    assert "FROM ./model.gguf" in text and "PARAMETER num_ctx 256" in text and "PARAMETER temperature 0" in text
    assert 'PARAMETER stop "<|end_of_text|>"' in text
    assert (tmp_path / "out" / "README.md").is_file()


def test_a_template_without_an_equal_is_refused_before_anything_is_written(tmp_path):
    odd = "{% for m in messages %}{{ loop.index ~ m['content'] | upper }}{% endfor %}"
    source = save_served(tmp_path / "m", template=odd)
    with pytest.raises(InputError, match="no equal in an Ollama Modelfile"):
        run(source, "--format", "ollama", "--output", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    plain = save_served(tmp_path / "plain", template=None)
    done = run(plain, "--format", "ollama", "--output", tmp_path / "out")
    assert "continues texts" in done.stderr and "{{ .Prompt }}" in (tmp_path / "out" / "Modelfile").read_text()


@pytest.mark.parametrize("format", ["hf", "gguf", "ollama"])
def test_an_output_that_is_there_is_refused_before_anything_is_loaded(format, tmp_path):
    (tmp_path / "out").write_text("kept")
    (tmp_path / "no model in here").mkdir()
    with pytest.raises(InputError, match="out exists"):
        run(tmp_path / "no model in here", "--format", format, "--output", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "kept"


def test_the_card_says_data_recipe_and_figures(finished, tmp_path):
    cli, name = finished
    run(cli.folder / name, "--output", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    summary = json.loads((cli.folder / name / "summary.json").read_text())
    assert "## Data" in card and "topics.py" in card and "batch_sequences: 12" in card
    assert f"{summary['validation_loss']:.6g}" in card


@pytest.mark.slow
def test_an_export_holds_one_shard_in_memory(tmp_path):
    """F06: 300 MB of weights, shards of 40 MB: the process grows by less than half of them."""
    source = save_served(tmp_path / "m", layers=6, width=1024, heads=8, kv_heads=8, ffn=2816)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    assert size > 280e6
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom tercet.inference.export import export_hf\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "before = peak()\nexport_hf(sys.argv[1], Path(sys.argv[2]), 'bf16', 40_000_000, lambda text: None)\n"
        "print(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "out")], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 150e6, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHAPES))
def test_llama_cpp_reads_the_file_and_says_the_same(name, tmp_path):
    """An independent runtime: ids of test prompts, and greedy tokens in fp16 as far as the choice is clear."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed (it compiles llama.cpp)")
    source = save_served(tmp_path / "m", width=64, heads=4, kv_heads=2, ffn=64, **{**SHAPES[name], "head_dim": 16})
    out = tmp_path / "m.gguf"
    # Random Qwen 3 shapes, whose queries and keys are normalised, amplify fp16's rounding to a tenth of the logits.
    run(source, "--format", "gguf", "--output", out, "--dtype", "fp32" if "qwen3" in name else "fp16")
    near = 4e-4 if "qwen3" in name else 0.02  # logits differ by 2e-4 in fp32
    served = open_served(out, "fp32")
    theirs = llama_cpp.Llama(str(out), n_ctx=256, verbose=False, logits_all=True)
    for text in ("the for statement", "模型🙂 is used", "  two  spaces\n\n"):
        ids = served.prompt_ids(text)
        assert theirs.tokenize(text.encode(), add_bos=True, special=False) == ids
        made = []
        for token in theirs.generate(ids, temp=0.0, repeat_penalty=1.0):
            logits = served.model(torch.tensor([[*ids, *made]]))[0, -1, : served.vocabulary]
            best = logits.topk(2).values
            if best[0] - best[1] < near * best[0].abs():  # too near for the format to tell
                break
            assert token == int(logits.argmax()), (text, made)
            made.append(token)
            if len(made) == 24:
                break
        assert made, text


def test_what_the_format_cannot_hold_is_refused_by_name(tmp_path):
    source = save_served(tmp_path / "m", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(InputError, match="no dynamic rotary scaling"):
        run(source, "--format", "gguf", "--output", tmp_path / "m.gguf")
    (tmp_path / "there").write_text("x")
    with pytest.raises(InputError, match="there exists"):
        run(source, "--output", tmp_path / "there")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"do_sample": False, "temperature": 0.7}, "PARAMETER temperature 0\n"),
        ({"temperature": 0.7}, "PARAMETER temperature 0.7\n"),
    ],
)
def test_ollama_is_greedy_where_the_model_is(settings, line, tmp_path):
    """Ollama draws at its own temperature unless the file names one."""
    source = save_served(tmp_path / "m", template=CHATML)
    (source / "generation_config.json").write_text(json.dumps(settings))
    run(source, "--format", "ollama", "--output", tmp_path / "out")
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert line in text and text.count("temperature") == 1


def test_ollama_without_tools_is_said_where_the_template_has_them(tmp_path):
    with_tools = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
    for n, (template, said) in enumerate(((with_tools, True), (CHATML, False))):
        done = run(
            save_served(tmp_path / f"m{n}", template=template), "--format", "ollama", "--output", tmp_path / f"o{n}"
        )
        assert ("requests with tools" in done.stderr) == said
