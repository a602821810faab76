"""Every preset has the parameters that transformers builds from its config, and those that its authors published."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tercet.spec.families import FAMILIES, HUB, from_config, preset, presets
from tercet.spec.model import Model

# Totals in the model cards and papers of the authors, in billions, as they round them.
PUBLISHED = {
    "deepseek-llm-7b": 6.91,
    "deepseek-llm-67b": 67.4,
    "deepseek-moe-16b": 16.4,
    "deepseek-v2-lite": 15.7,
    "deepseek-v2": 236,
    "deepseek-v3": 671,
    "llama-2-7b": 6.74,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21,
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5,
    "smollm2-135m": 0.135,
    "mistral-7b": 7.25,
}
ACTIVE = {"deepseek-v3": 37, "deepseek-v2": 21, "deepseek-moe-16b": 2.8, "qwen3-30b-a3b": 3.3, "deepseek-v2-lite": 2.4}


def transformers_count(model: Model) -> dict[str, tuple[int, ...]]:
    config = AutoConfig.for_model(**FAMILIES[model.family].to_hf(model))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    found = {n: tuple(p.shape) for n, p in built.named_parameters(remove_duplicate=True)}
    found.update({n: tuple(b.shape) for n, b in built.named_buffers() if n.endswith("e_score_correction_bias")})
    return found


def shapes(model: Model) -> dict[str, tuple[int, ...]]:
    return {t.name: t.shape for t in (*model.tensors(), *model.buffers())}


@pytest.mark.parametrize("name", [n for n in presets() if n != "deepseek-moe-16b"])  # transformers has no V1 MoE
def test_names_and_shapes_equal_transformers(name):
    model = preset(name).without_mtp()
    assert shapes(model) == transformers_count(model)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_totals_equal_the_published_ones(name):
    assert preset(name).without_mtp().parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_active_parameters_equal_the_published_ones(name):
    model = preset(name).without_mtp()
    active = model.active_parameters - model.vocabulary * model.width  # authors leave the embedding's lookup out
    assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.12)


@pytest.mark.parametrize("name", list(presets()))
def test_config_round_trip(name):
    model = preset(name)
    family, sizes = from_config(FAMILIES[model.family].to_hf(model), name)
    assert family.build(sizes, name) == model


def test_hub_names_lead_to_presets():
    assert set(HUB.values()) <= set(presets())
    assert HUB["deepseek-ai/deepseek-v2-lite"] == "deepseek-v2-lite"
