"""Sampling against transformers' own warpers and against counts."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from typer.testing import CliRunner

from tercet.cli import app
from tercet.inference.protocol import CompletionRequest
from tercet.inference.sampling import Sampling, choose, penalised, probabilities

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 3
TEXT = [3, 7, 7, 20, int(LOGITS.argmax()), int(LOGITS.argmin())]  # of both signs


@pytest.mark.parametrize(
    "how",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=5.0, min_p=0.6),
        Sampling(temperature=1.3, repetition_penalty=2.0),
        Sampling(temperature=1.3, repetition_penalty=0.7),
        Sampling(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.3),
    ],
)
def test_probabilities_are_transformers(how):
    scores = LOGITS[None]
    ids = torch.tensor([TEXT])
    for warper in (
        RepetitionPenaltyLogitsProcessor(how.repetition_penalty),
        TemperatureLogitsWarper(how.temperature),
        *([TopKLogitsWarper(how.top_k)] if how.top_k else []),
        *([TopPLogitsWarper(how.top_p)] if how.top_p < 1 else []),
        *([MinPLogitsWarper(how.min_p)] if how.min_p else []),
    ):
        scores = warper(ids, scores)
    expected = scores.softmax(-1)[0]
    found = probabilities(penalised(LOGITS, TEXT, how.repetition_penalty), how)
    torch.testing.assert_close(found / found.sum(), expected, rtol=1e-5, atol=1e-7)


def test_tokens_are_chosen_as_often_as_they_are_probable_and_the_penalised_scores_returned():
    how, chance, counts = Sampling(temperature=1.5, top_k=5, repetition_penalty=1.5), torch.Generator(), torch.zeros(50)
    best = LOGITS.topk(3).indices.tolist()
    for _ in range(2000):
        token, scores = choose(LOGITS, best, how, chance)
        counts[token] += 1
    expected = probabilities(penalised(LOGITS, best, 1.5), how)
    assert not counts[expected == 0].any()
    assert (counts / 2000 - expected / expected.sum()).abs().max() < 0.05
    assert torch.equal(scores, RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([best]), LOGITS[None])[0])


def test_zero_temperature_takes_the_best_and_the_penalty_acts_there_too():
    best = int(LOGITS.argmax())
    assert choose(LOGITS, [], Sampling(), Sampling().generator())[0] == best
    penalised = Sampling(repetition_penalty=100.0)
    assert choose(LOGITS, [best], penalised, penalised.generator())[0] != best


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 1e-4])
def test_the_coldest_temperatures_take_the_most_probable(temperature):
    logits = torch.tensor([1.0, 30.0, -80.0, 29.9])
    assert choose(logits, [], Sampling(temperature=temperature), torch.Generator())[0] == 1


ASKED = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3, "seed": 11}


def test_generate_passes_every_option_on(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("tercet.inference.served.open_served", lambda *args: None)
    monkeypatch.setattr(
        "tercet.inference.generate.answers",
        lambda served, prompts, n, how, stops, rows: seen.append((n, how, stops)) or [],
    )
    options = [word for key, value in ASKED.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "x", "--json", "--tokens", "5", "--stop", "y", *options])
    assert done.exit_code == 0, done.output
    assert seen == [(5, Sampling(**ASKED), ["y"])]


def test_a_request_counts_more_than_what_the_model_suggests():
    asked = CompletionRequest(model="m", prompt="x", **ASKED)
    assert asked.sampling({}, 0) == Sampling(**ASKED)
    assert asked.sampling(dict.fromkeys(ASKED, 0.5), 2) == Sampling(**{**ASKED, "seed": 13})
    suggested = {key: value for key, value in ASKED.items() if key != "seed"}
    plain = CompletionRequest(model="m", prompt="x")
    assert plain.sampling(suggested, 0) == Sampling(**suggested, seed=None)
    assert plain.sampling({"top_k": None}, 0) == Sampling(temperature=1.0, seed=None)
