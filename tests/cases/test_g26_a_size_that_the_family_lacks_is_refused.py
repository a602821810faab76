"""G26: a size in a recipe acts, or is refused with the families that have it."""

from __future__ import annotations

import pytest

from tercet.errors import InputError
from tercet.spec.families import FAMILIES, describe, presets
from tercet.spec.recipe import ModelSection

SIZES = {
    "layers": 3,
    "width": 64,
    "heads": 4,
    "ffn": 96,
    "vocabulary": 260,
    "kv_rank": 16,
    "nope_dim": 8,
    "rope_dim": 8,
    "value_dim": 8,
    "q_rank": 16,
    "experts": 8,
    "experts_per_token": 2,
    "shared_experts": 1,
    "expert_ffn": 24,
    "dense_layers": 1,
    "expert_groups": 2,
    "groups_per_token": 1,
    "expert_scale": 2.0,
    "normalize_experts": True,
    "mtp_depth": 1,
    "kv_heads": 2,
    "head_dim": 20,
    "norm_eps": 1e-4,
    "rope_theta": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "context_tokens": 77,
    "tied": True,
}
BASE = ("layers", "width", "heads", "ffn", "vocabulary")


def sizes_of(family: str) -> dict:
    return {key: value for key, value in SIZES.items() if key in FAMILIES[family].SIZES[family]}


def test_the_case_itself():
    section = ModelSection(**{key: SIZES[key] for key in BASE}, experts=8, mtp_depth=2)
    with pytest.raises(InputError) as caught:
        describe(section)
    assert "model.experts is not a size of the family llama; it is one of qwen3_moe, deepseek" in str(caught.value)
    assert "model.mtp_depth is not a size of the family llama; it is one of deepseek_v3" in str(caught.value)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_size_of_a_family_changes_what_is_saved_and_every_other_one_is_refused(family):
    own = sizes_of(family)
    module = FAMILIES[family]
    whole = module.to_hf(describe(ModelSection(family=family, **own)))
    changed = {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "tied": False,
        "normalize_experts": False,
        "expert_groups": 4,
        "groups_per_token": 2,
        "norm_eps": 1e-3,
    }
    for key in set(SIZES) & module.SIZES[family]:
        if (family, key) == ("qwen3_moe", "ffn"):
            continue  # of the dense layers that a config may name; a recipe cannot, so here it only has to be given
        other = changed[key] if key in changed else SIZES[key] * 2
        assert module.to_hf(describe(ModelSection(family=family, **{**own, key: other}))) != whole, key
    for key in set(SIZES) - module.SIZES[family]:
        with pytest.raises(InputError, match=f"model.{key} is not a size of the family {family}; it is one of "):
            describe(ModelSection(family=family, **own, **{key: SIZES[key]}))


def test_a_preset_is_held_to_it_too():
    assert "llama-3.2-1b" in presets()
    with pytest.raises(InputError, match=r"model.kv_rank is not a size of the family llama"):
        describe(ModelSection(preset="llama-3.2-1b", kv_rank=64))
    with pytest.raises(InputError, match=r"model.kv_heads is not a size of the family deepseek_v3"):
        describe(ModelSection(preset="deepseek-v3-tiny", kv_heads=2))


def test_sizes_of_experts_without_experts_are_refused():
    own = {key: value for key, value in sizes_of("deepseek_v3").items() if key != "experts"}
    with pytest.raises(InputError, match=r"model.expert_ffn changes nothing in a model without experts"):
        describe(ModelSection(family="deepseek_v3", **own))
