"""train.fp16_accumulation: planned where a card is faster so, refused where it is not, and told to PyTorch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tercet.planner.answer import answer_for
from tercet.spec.machine import machine_of
from tercet.spec.recipe import build_recipe
from tercet.training import assembly

FP16 = {"precision": "fp16"}
FAST = {**FP16, "fp16_accumulation": True}
CARDS = machine_of("3x4090", "256GiB")


def answer(train: dict, machine=CARDS):
    return answer_for(build_recipe({"model": "llama-3.1-8b", "data": {"train": "-"}, "train": train}), machine)


def test_it_is_planned_faster_with_its_risk_said():
    fast, plain = answer(FAST), answer(FP16)
    speed = fast["strategies"][0]["tokens_per_second"]
    assert speed > 1.02 * plain["strategies"][0]["tokens_per_second"]
    assert any("overflow at 65504" in note for note in fast["notes"])
    assert not any("overflow at 65504" in note for note in plain["notes"])
    measured = {"matmul_bf16": 150e12, "matmul_fp16": 150e12, "matmul_fp16_fast": 80e12}
    assert answer(FAST, replace(CARDS, measured=measured))["strategies"][0]["tokens_per_second"] < speed


@pytest.mark.parametrize(
    ("cards", "words"),
    [("2xH100 SXM 80GB", "'s matmuls are no faster"), (None, "a CPU's matmuls are never")],
)
def test_it_is_refused_where_it_brings_nothing(cards, words):
    found = answer(FAST, machine_of(cards, ranks=2))
    assert found["strategies"] == []
    assert any(words in why for refusal in found["refused"] for why in refusal["why"])


@pytest.mark.parametrize("wanted", [True, False])
def test_pytorch_is_told(monkeypatch, wanted):
    flags = SimpleNamespace(matmul=SimpleNamespace(allow_fp16_accumulation=not wanted))
    monkeypatch.setattr(torch.backends, "cuda", flags)
    monkeypatch.setattr(assembly, "open_engine", lambda setup: setup.precision)
    recipe = build_recipe(
        {"model": "first-light", "data": {"train": "-"}, "train": {**FP16, "fp16_accumulation": wanted}}
    )
    strategy, data = (
        SimpleNamespace(on_nvme=False),
        SimpleNamespace(vocabulary=9, stop_ids=(), train=SimpleNamespace(sources=["x"])),
    )
    assert assembly._engine(recipe, None, None, strategy, data, None) == "fp16"
    assert flags.matmul.allow_fp16_accumulation is wanted
