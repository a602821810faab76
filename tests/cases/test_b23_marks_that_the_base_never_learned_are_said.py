"""B23: turn marks whose rows the base model never trained, under an adapter: said before the first step, with the cure."""

from __future__ import annotations

import json

import pytest
import torch

from tercet.spec.families import describe
from tercet.spec.recipe import ModelSection, build_recipe
from tercet.spec.trained import trained_model
from tercet.training.untrained import untrained_marks
from tercet.weights.writing import save_folder
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.chats_tiny import folder, prepared, turns, words, write

SIZES = {"layers": 2, "width": 32, "heads": 4, "ffn": 44, "vocabulary": 430, "context_tokens": 128}
USED = ("<|im_start|>", "<|im_end|>")
LORA = "adapter={kind: lora, rank: 2, targets: [q_proj, v_proj]}"


def base(place, untrained: str, tied: bool = False) -> str:
    spec = describe(ModelSection(**SIZES, tied=tied))
    torch.manual_seed(0)
    weights = random_tensors(spec)
    ids = [words().backend.token_to_id(mark) for mark in USED]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights and untrained == "near zero":
            weights[name][ids] = 1e-6 * torch.randn(2, 32)
        if name in weights and untrained == "alike":
            weights[name][ids] = weights[name].mean(0)
        if name == "lm_head.weight" and name in weights and untrained == "head alone":
            weights[name][ids] = 0
    save_folder(place, spec, weights.items(), torch.bfloat16)
    return str(place)


def said(tmp_path, untrained: str, *keys: str, tied: bool = False) -> str | None:
    path = base(tmp_path / "base", untrained, tied)
    data = prepared(tmp_path, [{"messages": turns(f"question {n}?", f"answer {n}.")} for n in range(9)])
    given = [f"model={{path: {path}, init: pretrained}}", *keys]
    recipe = build_recipe({"model": {"path": path}, "data": {"train": "rows.jsonl"}}, given)
    return untrained_marks(recipe, trained_model(recipe), data)


@pytest.mark.parametrize("untrained", ["near zero", "alike", "head alone"])
def test_they_are_named_with_the_cure(tmp_path, untrained):
    text = said(tmp_path, untrained, LORA)
    assert text is not None and "<|im_end|>, <|im_start|>" in text and "<|User|>" not in text
    assert "adapter.modules_to_save=[embed_tokens,lm_head]" in text


def test_of_a_tied_model_there_is_one_table(tmp_path):
    text = said(tmp_path, "near zero", LORA, tied=True) or ""
    assert "adapter=none" in text and "modules_to_save" not in text  # which would be refused


def test_frozen_without_an_adapter(tmp_path):
    text = said(tmp_path, "near zero", "train.freeze=[embed_tokens]") or ""
    assert "take embed_tokens out of train.freeze" in text


@pytest.mark.parametrize(
    ("untrained", "keys"),
    [
        ("none", [LORA]),
        ("near zero", []),
        ("near zero", [LORA, "adapter.modules_to_save=[embed_tokens,lm_head]"]),
        ("near zero", [LORA, "model.init=random"]),
    ],
)
def test_nothing_is_said_where_they_are_learned(tmp_path, untrained, keys):
    assert said(tmp_path, untrained, *keys) is None


@pytest.mark.slow
def test_a_run_says_it_before_its_first_step_and_keeps_the_template(cli):
    base(cli.folder / "base", "near zero")
    folder(cli.folder / "words")
    write(cli.folder / "rows.jsonl", [{"messages": turns(f"question {n}?", f"answer {n}.")} for n in range(30)])
    (cli.folder / "chats.yaml").write_text(
        "model: {path: base, init: pretrained}\n"
        "data: {train: rows.jsonl, tokenizer: words, template: chatml, sequence_tokens: 64}\n"
        "adapter: {kind: lora, rank: 2}\ntrain: {batch_sequences: 4, steps: 2, precision: fp32}\n"
    )
    cli.run("train", "chats.yaml", "--ranks", "2", "--output", "run")
    kinds = [(e["event"], e.get("message", "")) for e in cli.events("run")]
    warned = [n for n, (kind, text) in enumerate(kinds) if kind == "warning" and "<|im_end|>" in text]
    assert len(warned) == 1 and warned[0] < [kind for kind, _ in kinds].index("step")
    kept = json.loads((cli.folder / "run" / "adapter" / "tokenizer_config.json").read_text())
    template = kept.get("chat_template") or (cli.folder / "run" / "adapter" / "chat_template.jinja").read_text()
    assert "<|im_start|>" in template
