"""G57: a model that is trained without the further predictions it came with says so (a weight of 0 freezes them)."""

from __future__ import annotations

import pytest

from tercet.spec.recipe import ModelSection
from tercet.training.preflight import without_further_predictions
from tests.served_tiny import save_served

LATENT = {"kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "value_dim": 12, "kv_heads": None}
EXPERTS = {"experts": 4, "experts_per_token": 2, "expert_ffn": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("v3") / "source"
    return save_served(place, family="deepseek_v3", **LATENT, **EXPERTS, dense_layers=1, mtp_depth=1)


def test_removal_is_said(folder):
    said = without_further_predictions(ModelSection(path=str(folder), mtp_depth=0))
    assert said is not None
    assert "model.mtp_depth is 0" in said and f"{folder} has 1" in said and "left out" in said


@pytest.mark.parametrize("keys", [{}, {"mtp_depth": 1}])
def test_what_stays_is_not_spoken_of(folder, keys):
    assert without_further_predictions(ModelSection(path=str(folder), **keys)) is None


@pytest.mark.slow
def test_a_run_says_it(cli, folder):
    done = cli.run(
        *("train", "small.yaml", "--ranks", "1", "--output", "run", f"model={folder}", "model.mtp_depth=0"),
        *("data.tokenizer=model", "data.sequence_tokens=32", "train.steps=1", "train.sample_prompts=[]"),
        *("train.evaluate_every=0", "data.validation=none"),
    )
    assert "its further predictions are left out" in done.stderr
